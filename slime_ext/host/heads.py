"""The sampler's head in the trainer: its K most likely tokens at each response token, for ``center``.

``rollout_heads`` leaves the heads of a rollout by the index of each sample. Here an optimizer step finds
those of its samples, and ``at_logits`` makes the trainer's log-probs of the same tokens from the logits that
the policy loss sees.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slime_ext.core.state import Head
from slime_ext.errors import DataError
from slime_ext.host import contract, hosts, staleness, step_metrics
from slime_ext.host.packing import context_parallel, pack_segments, parallel_state, sum_over
from slime_ext.host.rollout_data import Samples
from slime_ext.host.session import session
from slime_ext.ops.segments import to_device
from slime_ext.ops.vocabulary import log_probs_at

Rows = tuple[Tensor, Tensor]  # ids [R, K] int32 and log-probs [R, K] float32, -inf where there is none
TRAINER = "topk_log_probs"  # in train dumps: the trainer's of the tokens of rollout_topk_token_ids
FLAG = f"{contract.flag_of('custom_generate_function_path')} slime_ext.host.generate"


def of_step(rollout_id: int, samples: Samples, top_k: int) -> list[Rows]:
    """The heads of an optimizer step's samples, in their order.

    Raises:
        DataError: one that ``publish`` did not see, or of another width.
    """
    known = session.heads.get(rollout_id) or {}
    if not known and (data := staleness.left(staleness.HEADS, rollout_id)):
        known = sys.modules["ray"].cloudpickle.loads(data)
    lacking = [index for index in samples.indices if index not in known]
    if lacking:
        raise DataError(
            f"center: expected the sampler's head of every sample of rollout {rollout_id}, got none of "
            f"{len(lacking)} of {len(samples.indices)}, the first is {lacking[0]}: sample them with {FLAG}"
        )
    heads = [known[index] for index in samples.indices]
    if heads and not isinstance(heads[0], tuple):
        heads = sys.modules["ray"].get(heads)
    for ids, _ in heads:
        if ids.shape[1] != top_k:
            raise DataError(
                f"center.top_k: expected {ids.shape[1]}, as in the rollout, got {top_k}: both read the same "
                "configuration"
            )
    return heads


def at_logits(given: Sequence[Any], named: Mapping[str, Any], inputs: Mapping[str, Any]) -> Head | None:
    """The head of a micro-batch's local response tokens; None unless the optimizer step has heads.

    Args:
        given, named: of the call of ``get_log_probs_and_entropy``.
        inputs: of the policy loss that is running.

    Raises:
        DataError: the samples are not those of the step.
    """
    step = step_metrics.current_step()
    if not step.heads:
        return None
    batch, logits = inputs["batch"], given[0]
    places = step.samples.places(batch["loss_masks"])
    if places is None:
        raise DataError(
            "center: expected a policy loss on the samples of its optimizer step, got others: their heads "
            "are not known"
        )
    here = context_parallel()
    lengths = batch["total_lengths"], batch["response_lengths"], batch.get("max_seq_lens")
    segments = pack_segments(batch["loss_masks"], *lengths, here)
    parts = [(step.heads[places[i]], start, stop) for i, start, stop, _ in segments.local_shards]
    ids, sampler = (
        to_device(torch.cat([rows[n][start:stop] for rows, start, stop in parts]), logits.device)
        for n in (0, 1)
    )
    trainer = _trainer(logits, ids, named)
    if here.size == 1 and getattr(named["args"], "save_debug_train_data", None):
        each = torch.split(trainer, [stop - start for _, start, stop, _ in segments.local_shards])
        _keep(step.rollout, [step.samples.indices[place] for place in places], each)
    return Head(sampler, trainer)


def _keep(rollout: dict[str, Any], indices: Sequence[Any], log_probs: Sequence[Tensor]) -> None:
    """Adds the trainer's log-probs [R, K] of samples to the rollout, which the host dumps whole."""
    of_all = rollout["sample_indices"]
    kept, places = rollout.setdefault(TRAINER, [None] * len(of_all)), {i: at for at, i in enumerate(of_all)}
    for index, values in zip(indices, log_probs, strict=True):
        kept[places[index]] = values.detach()


def _trainer(logits: Tensor, ids: Tensor, named: Mapping[str, Any]) -> Tensor:
    """[T, K] the trainer's log-probs of the tokens ``ids`` at T local response tokens, with grad."""
    rows = _rows_that_respond(logits, named)
    flat = logits.reshape(-1, logits.shape[-1])
    temperature = getattr(named["args"], "rollout_temperature", 1.0)
    # Of all rows, then those that respond: of the logits no copy is made, and their gradient is written once.
    at_rows = ids.new_zeros(len(flat), ids.shape[1]).index_copy(0, rows, ids)
    share = _share(logits.shape[-1])
    return log_probs_at(flat, at_rows, temperature=temperature, **share).index_select(0, rows)


def _rows_that_respond(logits: Tensor, named: Mapping[str, Any]) -> Tensor:
    """Finds the row of the logits that predicts each response token.

    Passing row numbers through the host's own slicing function works in any layout.

    Returns:
        [T] int64.
    """
    host = hosts.current()
    assert host is not None
    cut = hosts.function_of(host.name, hosts.RESPONSES)
    assert cut is not None
    numbers = torch.arange(logits.shape[:-1].numel(), dtype=torch.float32, device=logits.device)
    args = copy.copy(named["args"])
    args.rollout_temperature, args.true_on_policy_mode = 1.0, False
    known = inspect.signature(cut).parameters
    more = {key: value for key, value in named.items() if key in known} | {"args": args}
    chunks = [chunk for chunk, _ in cut(numbers.view(*logits.shape[:-1], 1), **more)]
    return torch.cat(chunks)[:, 0].long()


def _share(width: int) -> dict[str, Any]:
    """This rank's part of the vocabulary, of ``width`` tokens, as ``log_probs_at`` takes it."""
    state = parallel_state()
    if state is None or (parts := state.get_tensor_model_parallel_world_size()) == 1:
        return {}
    part = state.get_tensor_model_parallel_rank()
    all_sum = sum_over(state.get_tensor_model_parallel_group())
    return {"offset": part * width, "part": part, "parts": parts, "all_sum": all_sum}
