"""Reads the sampler's head or support in the trainer, for ``center``.

The head is the sampler's K most likely tokens at each response token. The support is every token that it
could draw there. ``rollout_heads`` publishes heads and supports by the index of their sample. Here an
optimizer step finds those of its samples, and ``at_logits`` computes the trainer's log-probs of the same
tokens from the logits that the policy loss reads.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from slime_ext.core.tokens import Head, Support
from slime_ext.errors import ConfigError, DataError
from slime_ext.host import published
from slime_ext.host.memory import Memory
from slime_ext.host.packing import pack_segments
from slime_ext.host.policy_loss import LossCall
from slime_ext.host.ranks import Parallel, parallel_state, sum_over
from slime_ext.host.rollout_data import Samples
from slime_ext.hosts import contract, running
from slime_ext.hosts.code import RESPONSES, SCORE
from slime_ext.ops.centering import owners
from slime_ext.ops.segments import to_device
from slime_ext.ops.vocabulary import log_probs_at, log_probs_within

Rows = tuple[Tensor, Tensor]  # ids [R, K] int32 and log-probs [R, K] float32, -inf for an absent entry
# The supports of a sample, as slime records them: ids [N] int32 of all response tokens' supports, offsets
# [R + 1] int64 between the supports, and log-probs [N] float32, normalised over each support.
SupportRows = tuple[Tensor, Tensor, Tensor]
# Names in train dumps: the trainer's log-probs of rollout_topk_token_ids and of rollout_top_p_token_ids.
TRAINER, OF_SUPPORT = "topk_log_probs", "top_p_log_probs"


@dataclass
class ScoredRollout:
    """Holds the head's log-probs of the rollout that the host scores and trains.

    Args:
        by_index: sample index -> the proximal policy's log-probs at its head; None before the pass.
    """

    rollout_id: int
    by_index: dict[Any, Tensor] | None = None


# Rollout -> sample index -> the sample's heads, or Ray's reference to them.
HEADS: Memory[dict[int, dict[Any, Any]]] = Memory(dict)
SCORED: Memory[ScoredRollout | None] = Memory(lambda: None)  # ``proximal_heads`` fills it


def of_step(rollout_id: int, samples: Samples, top_k: int) -> list[Rows | SupportRows]:
    """Finds the heads, or the supports, of an optimizer step's samples, in their order.

    Raises:
        DataError: a sample has no published head, or a head of another width.
    """
    known = HEADS.value.get(rollout_id) or {}
    if not known and (data := published.fetch_for_trainer(published.HEADS, rollout_id)):
        known = sys.modules["ray"].cloudpickle.loads(data)
    lacking = [index for index in samples.indices if index not in known]
    if lacking:
        raise DataError(
            f"center: expected the sampler's head of every sample of rollout {rollout_id}, got none for "
            f"{len(lacking)} of {len(samples.indices)} samples, such as sample {lacking[0]}: sample with "
            f"{contract.GENERATE_FLAG}"
        )
    heads = [known[index] for index in samples.indices]
    if heads and not isinstance(heads[0], tuple):
        heads = sys.modules["ray"].get(heads)
    for rows in heads:
        if len(rows) == 2 and (ids := rows[0]).shape[1] != top_k:
            raise DataError(
                f"center.top_k: expected {ids.shape[1]}, as in the rollout, got {top_k}: start rollout and "
                "trainer with the same configuration"
            )
    return heads


def proximal_of(samples: Samples, *, is_moved: bool) -> Sequence[Tensor] | None:
    """Finds the proximal policy's log-probs at the heads of an optimizer step's samples.

    They come from the host's log-prob pass (``proximal_heads``). Without such a pass the target is the
    proximal policy, and this returns None.

    Args:
        is_moved: whether the target may differ from the proximal policy.

    Raises:
        ConfigError: the two may differ, and there was no such pass.
    """
    known = SCORED.value.by_index if SCORED.value else None
    if known is not None:
        return [known[index] for index in samples.indices]
    if is_moved:
        raise ConfigError(
            "center: expected the proximal policy's log-probs at the head from the host's log-prob pass, got "
            f"none, because {SCORE} was not called before the optimizer step: use one optimizer step "
            "per rollout (--num-steps-per-rollout 1), or surrogate: reinforce with numerator: target"
        )
    return None


def at_logits(
    positional: Sequence[Any], named: Mapping[str, Any], loss_call: LossCall, host: running.Host
) -> Head | Support | None:
    """Makes the head, or the support, of a micro-batch's local response tokens.

    Args:
        positional, named: the arguments of the call of ``get_log_probs_and_entropy``.
        loss_call: the call of the policy loss that computes them.

    Returns:
        The head or the support; None if the optimizer step has neither.

    Raises:
        DataError: the samples are not those of the optimizer step.
        ConfigError: there are supports, and the host normalises its log-probs over the whole vocabulary.
    """
    step, batch, logits = loss_call.step, loss_call.batch, positional[0]
    if not step.heads or batch is None:
        return None
    places = step.samples.places(batch["loss_masks"])
    if places is None:
        raise DataError(
            "center: expected a policy loss on the samples of its optimizer step, got other samples, whose "
            "heads are not known: pass the policy loss the loss_masks of the rollout data unchanged"
        )
    rows, parallel = [step.heads[place] for place in places], step.parallel
    held, sizes = gathered(rows, batch, logits, named, host, parallel)
    if parallel.size == 1 and getattr(named["args"], "save_debug_train_data", None):
        key, each = OF_SUPPORT if isinstance(held, Support) else TRAINER, torch.split(held.trainer, sizes)
        _keep(key, step.rollout, [step.samples.indices[place] for place in places], each)
    if step.proximal_heads is None:
        return held
    return replace(held, proximal=torch.cat([step.proximal_heads[place] for place in places]))


def gathered(
    rows: Sequence[tuple[Tensor, ...]],
    batch: Mapping[str, Any],
    logits: Tensor,
    named: Mapping[str, Any],
    host: running.Host,
    parallel: Parallel,
) -> tuple[Head | Support, list[int]]:
    """Joins the sampler's and the trainer's log-probs of the same tokens.

    They are those of the local response tokens. The trainer's come from ``logits``.

    Args:
        rows: the head or the supports of each sample of the micro-batch.
        batch: holds ``loss_masks`` and the lengths of these samples.
        named: the keywords of the call of ``get_log_probs_and_entropy``.
        parallel: this rank's place among those that share the sequences.

    Returns:
        The head or support, and each sample's number of rows in the head, or of entries in the support, on
        this rank.
    """
    lengths = batch["total_lengths"], batch["response_lengths"], batch.get("max_seq_lens")
    segments = pack_segments(batch["loss_masks"], *lengths, parallel)
    parts = [(rows[i], start, stop) for i, start, stop, _ in segments.local_shards]
    if all(len(each) == 2 for each in rows):
        return _head(parts, logits, named, host), list(segments.local_lengths)
    sizes = [0] * len(rows)
    for i, start, stop, _ in segments.local_shards:
        sizes[i] += int(rows[i][1][stop]) - int(rows[i][1][start])
    return _support(parts, logits, named, host), sizes


def _keep(key: str, rollout: dict[str, Any], indices: Sequence[Any], log_probs: Sequence[Tensor]) -> None:
    """Adds the trainer's log-probs of samples to the rollout, which the host dumps."""
    of_all = rollout["sample_indices"]
    kept, places = rollout.setdefault(key, [None] * len(of_all)), {i: at for at, i in enumerate(of_all)}
    for index, values in zip(indices, log_probs, strict=True):
        kept[places[index]] = values.detach()


def _head(
    parts: Sequence[tuple[Any, int, int]], logits: Tensor, named: Mapping[str, Any], host: running.Host
) -> Head:
    ids, sampler = (
        to_device(torch.cat([rows[n][start:stop] for rows, start, stop in parts]), logits.device)
        for n in (0, 1)
    )
    rows = _rows_that_respond(logits, named, host)
    flat = logits.reshape(-1, logits.shape[-1])
    # The log-probs of all rows are computed, and then those of response tokens are selected. This copies no
    # logits, and writes their gradient once.
    at_rows = ids.new_zeros(len(flat), ids.shape[1]).index_copy(0, rows, ids)
    share = _share(logits.shape[-1])
    trainer = log_probs_at(flat, at_rows, temperature=_temperature(named), **share).index_select(0, rows)
    return Head(sampler, trainer)


def _support(
    parts: Sequence[tuple[Any, int, int]], logits: Tensor, named: Mapping[str, Any], host: running.Host
) -> Support:
    if named.get("top_p_token_ids") is None:
        raise ConfigError(
            "center: expected a host whose log-probs are normalised over what --rollout-top-p leaves "
            "(slime's main), got one that normalises over the whole vocabulary: remove --rollout-top-p"
        )
    spans = [slice(int(rows[1][start]), int(rows[1][stop])) for rows, start, stop in parts]
    ids, sampler = (
        torch.cat([rows[n][span] for (rows, *_), span in zip(parts, spans, strict=True)]) for n in (0, 2)
    )
    sizes = [rows[1][start : stop + 1].diff() for rows, start, stop in parts]
    offsets = pad(torch.cat(sizes).cumsum(0), (1, 0))
    ids, sampler, offsets = (to_device(values, logits.device) for values in (ids, sampler, offsets))
    rows = _rows_that_respond(logits, named, host).index_select(0, owners(offsets, len(ids)))
    share = {key: value for key, value in _share(logits.shape[-1]).items() if key in ("offset", "all_sum")}
    flat = logits.reshape(-1, logits.shape[-1])
    trainer = log_probs_within(flat, ids, rows, offsets, temperature=_temperature(named), **share)
    return Support(sampler, trainer, offsets)


def _temperature(named: Mapping[str, Any]) -> float:
    return float(getattr(named["args"], "rollout_temperature", 1.0))


def _rows_that_respond(logits: Tensor, named: Mapping[str, Any], host: running.Host) -> Tensor:
    """Finds the row of the logits that predicts each response token.

    Passing row numbers through the host's own slicing function works in any layout.

    Returns:
        [T] int64.
    """
    cut = running.find_function(host.name, RESPONSES)
    assert cut is not None
    numbers = torch.arange(logits.shape[:-1].numel(), dtype=torch.float32, device=logits.device)
    args = copy.copy(named["args"])
    args.rollout_temperature, args.true_on_policy_mode = 1.0, False
    known = inspect.signature(cut).parameters
    more = {key: value for key, value in named.items() if key in known} | {"args": args}
    chunks = [chunk for chunk, _ in cut(numbers.view(*logits.shape[:-1], 1), **more)]
    return torch.cat(chunks)[:, 0].long()


def _share(width: int) -> dict[str, Any]:
    """Describes this rank's part of the vocabulary, of ``width`` tokens, for ``log_probs_at``."""
    state = parallel_state()
    if state is None or (parts := state.get_tensor_model_parallel_world_size()) == 1:
        return {}
    part = state.get_tensor_model_parallel_rank()
    all_sum = sum_over(state.get_tensor_model_parallel_group())
    return {"offset": part * width, "part": part, "parts": parts, "all_sum": all_sum}
