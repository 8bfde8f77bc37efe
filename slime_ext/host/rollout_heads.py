"""The sampler's head in the rollout's process: asked for, kept with its sample, left for the trainer.

``generate`` (``slime_ext.host.generate`` for --custom-generate-function-path) runs the host's own generate
function and asks SGLang for the head in the same request. The head stays with its sample, under the names
that slime has for it, until the host logs the rollout; then it goes to Ray's object store.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from slime_ext.errors import DataError, warn_once
from slime_ext.host import contract, hosts, staleness
from slime_ext.host.configured import center_of_flags
from slime_ext.host.heads import FLAG, Rows
from slime_ext.host.session import session
from slime_ext.ops.divergences import HIGHEST, is_log_prob

FIELDS = ("rollout_topk_token_ids", "rollout_topk_log_probs")  # of a sample, as in slime since 2e5cd7c
NEAR = 1e-3  # nats between a token's log-prob as it was recorded and as its head has it
MASS = 1.0001  # of a head; the rounding of float32 log-probs stays below it
NO_NUMBERS = (TypeError, ValueError, RuntimeError, OverflowError, IndexError, KeyError)  # of making a tensor
NO_VOCABULARY = (
    "center: expected --vocab-size, or a config.json with vocab_size at --hf-checkpoint, got neither: ids of "
    "the sampler's head have no upper bound"
)


@dataclass
class Asked:
    """What is asked of the engine for one sample, and its answers."""

    top_k: int
    there: int  # tokens of the vocabulary, of which there may be fewer
    answers: list[Rows] = field(default_factory=list)


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """The host's own ``generate``, with the sampler's head where a correction centers.

    A generate function of your own calls this one in place of the host's.

    Raises:
        DataError: the engine did not answer with the head of every token.
    """
    package = type(sample).__module__.partition(".")[0]
    rollout = importlib.import_module(f"{package}.rollout.sglang_rollout")
    center = center_of_flags(args)
    if evaluation or center is None:
        return await rollout.generate(args, sample, sampling_params)
    hosts.wrap(rollout, "post", _asking)
    _publish_with_log(args)
    before = sample.response_length
    asked = Asked(center.top_k, len(rollout.GenerateState(args).tokenizer))
    token = session.asked.set(asked)
    try:
        sample = await rollout.generate(args, sample, sampling_params)
    finally:
        session.asked.reset(token)
    _keep(sample, before, asked)
    return sample


def _asking(post: Callable[..., Any]) -> Callable[..., Any]:
    async def asking(url: str, payload: dict[str, Any], *given: Any, **named: Any) -> Any:
        asked = session.asked.get()
        if asked is None or "sampling_params" not in payload:
            return await post(url, payload, *given, **named)
        more = {"top_logprobs_num": min(asked.top_k, asked.there)}
        output = await post(url, payload | more, *given, **named)
        asked.answers.append(read(output["meta_info"], asked.top_k))
        return output

    return asking


def read(meta_info: Mapping[str, Any], top_k: int) -> Rows:
    """The heads of an answer of SGLang's, one for each token that it sampled.

    Raises:
        DataError: it has others.
    """
    sampled = meta_info.get("output_token_logprobs") or ()
    heads = meta_info.get("output_top_logprobs") or ()
    if len(heads) != len(sampled) or not all(heads):
        raise DataError(
            f"output_top_logprobs: expected the head of each of {len(sampled)} sampled tokens, got "
            f"{sum(map(bool, heads))}: center needs an engine that answers top_logprobs_num, as SGLang does"
        )
    if not heads:
        return _none(0, top_k)
    try:
        ids = torch.tensor([[entry[1] for entry in head] for head in heads], dtype=torch.int64)
        log_probs = torch.tensor([[entry[0] for entry in head] for head in heads], dtype=torch.float32)
    except NO_NUMBERS:
        ids = log_probs = torch.zeros(0)
    if ids.dim() != 2 or ids.shape[1] > top_k:
        raise DataError(
            f"output_top_logprobs: expected as many pairs of a log-prob and an id at every token, at most "
            f"{top_k} (center.top_k), got others: what answers is no SGLang, or changes its answers"
        )
    short = (0, top_k - ids.shape[1])
    return pad(ids, short), pad(log_probs, short, value=-torch.inf)


def _none(tokens: int, top_k: int) -> Rows:
    return torch.zeros(tokens, top_k, dtype=torch.int64), torch.full((tokens, top_k), -torch.inf)


def _keep(sample: Any, before: int, asked: Asked) -> None:
    """Adds the answers to what the sample has; tokens that the engine did not sample have no head."""
    ids, log_probs = (torch.cat(parts) for parts in zip(_none(0, asked.top_k), *asked.answers, strict=True))
    if len(ids) != sample.response_length - before:
        raise DataError(
            f"{FIELDS[1]}, sample {sample.index}: expected the heads of {sample.response_length - before} "
            f"new tokens, got {len(ids)}: something between the engine and the sample adds tokens or drops "
            "some"
        )
    was = _rows_of(sample, before, asked.top_k)
    for name, old, new in zip(FIELDS, was, (ids, log_probs), strict=True):
        setattr(sample, name, torch.cat([old, new]))


def _rows_of(sample: Any, tokens: int, top_k: int) -> Rows:
    """A sample's heads, with none at the tokens behind them.

    Raises:
        DataError: they are not [tokens or fewer, top_k] ids and log-probs.
    """
    given = [getattr(sample, name, None) for name in FIELDS]
    if any(values is None for values in given):
        return _none(tokens, top_k)
    ids, log_probs = (_tensor(name, sample, values) for name, values in zip(FIELDS, given, strict=True))
    wanted = f"[{tokens} or fewer, {top_k}], its response tokens and center.top_k"
    for name, values in zip(FIELDS, (ids, log_probs), strict=True):
        fits = values.dim() == 2 and len(values) <= tokens and values.shape[1] == top_k
        if not fits or len(values) != len(ids):
            raise DataError(
                f"{name}, sample {sample.index}: expected a table of {wanted}, got {list(values.shape)}: "
                "write one row per response token, as slime_ext.host.generate does"
            )
    if ids.is_floating_point() or ids.is_complex():
        raise DataError(
            f"{FIELDS[0]}, sample {sample.index}: expected whole numbers, got {ids.dtype}: write ids"
        )
    more = (0, 0, 0, tokens - len(ids))
    return pad(ids.long(), more), pad(log_probs.float(), more, value=-torch.inf)


def _tensor(name: str, sample: Any, values: Any) -> Tensor:
    """A CPU tensor from what a sample has: a tensor, an array or lists of numbers."""
    try:
        return torch.as_tensor(values).detach().cpu()
    except NO_NUMBERS:
        raise DataError(
            f"{name}, sample {sample.index}: expected numbers, one row or one number per response token, got "
            "something else: see slime_ext.host.generate"
        ) from None


def _publish_with_log(args: Any) -> None:
    """Has the heads published when the host logs a rollout, before its samples go to the trainer."""
    name = contract.LOG
    path = getattr(args, name, None) or contract.OURS[name]
    setattr(args, name, path)
    module, _, function = path.rpartition(".")
    hosts.wrap(importlib.import_module(module), function, _publishing)


def _publishing(log: Callable[..., Any]) -> Callable[..., Any]:
    def log_rollout(rollout_id: int, args: Any, samples: Sequence[Any], *given: Any, **named: Any) -> Any:
        if (center := center_of_flags(args)) is not None:
            publish(rollout_id, samples, center.top_k, vocabulary_of(args))
        return log(rollout_id, args, samples, *given, **named)

    return log_rollout


def vocabulary_of(args: Any) -> int | None:
    """How many token ids the model has, from Megatron's flags or the ``config.json`` of --hf-checkpoint; None
    if neither says."""
    of_flags = (getattr(args, name, None) for name in ("padded_vocab_size", "vocab_size"))
    path = getattr(args, "hf_checkpoint", None)
    known = next((count for count in of_flags if count), None) or (
        _of_checkpoint(str(path)) if path else None
    )
    if known is None:
        warn_once(NO_VOCABULARY)
    return known


@functools.cache
def _of_checkpoint(path: str) -> int | None:
    try:
        config = json.loads(Path(path, "config.json").read_text())
        count = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return count if isinstance(count, int) else None


def publish(rollout_id: int, samples: Iterable[Any], top_k: int, vocabulary: int | None = None) -> None:
    """Leaves the heads of a rollout's samples for the trainer.

    Args:
        vocabulary: how many token ids the model has; None: ids have no upper bound.

    Raises:
        DataError: two samples of one index, or a token that counts without a head that is one and fits it.
    """
    heads: dict[Any, Rows] = {}
    for sample in staleness.flat(samples):
        if sample.index is None or sample.index in heads:
            raise DataError(
                f"Sample.index: expected one of its own for every sample beside center, got {sample.index} "
                "again: the trainer finds a sample's head by it"
            )
        heads[sample.index] = _checked(sample, top_k, vocabulary)
    session.heads[rollout_id] = heads
    if staleness.store() is not None:
        ray = sys.modules["ray"]
        session.heads[rollout_id] = {index: ray.put(rows) for index, rows in heads.items()}
        found = ray.cloudpickle.dumps(session.heads[rollout_id])
        staleness.leave(staleness.HEADS, rollout_id, found)
    for past in list(session.heads)[: -staleness.WAITING[staleness.HEADS]]:
        del session.heads[past]


def _checked(sample: Any, top_k: int, vocabulary: int | None) -> Rows:
    """A sample's heads. There is a sound one at each token that counts, and it has the recorded log-prob for
    it. An entry that is no log-prob, such as -inf, reads as absent."""
    count = sample.response_length
    ids, log_probs = _rows_of(sample, count, top_k)
    counts = torch.ones(count) if sample.loss_mask is None else _column("loss_mask", sample, sample.loss_mask)
    counts = counts > 0
    _check_sound(sample, counts, ids, log_probs, vocabulary)
    log_probs = torch.where(is_log_prob(log_probs), log_probs, -torch.inf)
    lacking = counts & (log_probs.amax(1) == -torch.inf)
    if lacking.any():
        raise DataError(
            f"{FIELDS[1]}, sample {sample.index}: expected a head at each response token that counts, got "
            f"none at token {_first(lacking)}: sample it with {FLAG}"
        )
    sampled = _column("tokens", sample, sample.tokens[len(sample.tokens) - count :])
    recorded = sample.rollout_log_probs
    if recorded is None or len(recorded) == 0:
        recorded = [0.0] * count
    recorded = _column("rollout_log_probs", sample, recorded)
    own = (ids == sampled[:, None]) & (log_probs > -torch.inf) & counts[:, None]
    apart = torch.where(own, log_probs - recorded[:, None], 0).abs().amax(1)
    if (apart > NEAR).any():
        at = int(apart.argmax())
        raise DataError(
            f"rollout_log_probs, sample {sample.index}, response token {at}: expected the log-prob that the "
            f"sampler's head has for it, got one {float(apart[at]):.3g} nats away: both must be of the same "
            "pass and temperature"
        )
    return ids.int(), log_probs


def _check_sound(sample: Any, counts: Tensor, ids: Tensor, log_probs: Tensor, vocabulary: int | None) -> None:
    """Raises DataError at the first token that counts whose head cannot be part of a distribution."""
    there, last = is_log_prob(log_probs), (1 << 31 if vocabulary is None else vocabulary) - 1
    mass = torch.where(there, log_probs, -torch.inf).double().exp().sum(1)
    # Entries that are absent get numbers below 0 of their own: they repeat no id.
    distinct = torch.where(there, ids, -1 - torch.arange(ids.shape[1])).sort(1).values
    twice = distinct[:, 1:] == distinct[:, :-1]
    faults = (
        (FIELDS[1], "numbers", "NaN", log_probs.isnan(), "the engine's pass overflowed there"),
        (
            FIELDS[1],
            "log-probs of at most 0",
            "one above",
            log_probs > HIGHEST,
            "write log-probs, not logits",
        ),
        (
            FIELDS[0],
            f"ids from 0 to {last}",
            "another",
            there & ((ids < 0) | (ids > last)),
            "of the model's tokens",
        ),
        (FIELDS[0], "each id once", "one twice", twice, "its probability would count twice"),
        (
            FIELDS[1],
            "probabilities that add up to at most 1",
            "more",
            (mass > MASS)[:, None],
            "normalise them over the whole vocabulary, at the temperature of sampling",
        ),
    )
    for name, wanted, got, flags, why in faults:
        if (wrong := counts & flags.any(1)).any():
            raise DataError(
                f"{name}, sample {sample.index}, response token {_first(wrong)}: expected {wanted} in the "
                f"sampler's head, got {got}: {why}"
            )


def _column(name: str, sample: Any, values: Any) -> Tensor:
    """[response tokens] of a sample."""
    found, count = _tensor(name, sample, values), sample.response_length
    if found.shape != (count,):
        raise DataError(
            f"{name}, sample {sample.index}: expected {count} numbers, one per response token, got a shape "
            f"of {list(found.shape)}: center reads them beside the sampler's head"
        )
    return found


def _first(flags: Tensor) -> int:
    return int(flags.int().argmax())
