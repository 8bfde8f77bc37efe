"""The sampler's head in the rollout's process: asked for, kept with its sample, left for the trainer.

``generate`` (``slime_ext.host.generate`` for --custom-generate-function-path) runs the host's own generate
function and asks SGLang for the head in the same request. The head stays with its sample, under the names
that slime has for it, until the host logs the rollout; then it goes to Ray's object store.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import pad

from slime_ext.errors import DataError
from slime_ext.host import contract, hosts, staleness
from slime_ext.host.configured import center_of_flags
from slime_ext.host.heads import FLAG, Rows, held

FIELDS = ("rollout_topk_token_ids", "rollout_topk_log_probs")  # of a sample, as in slime since 2e5cd7c
NEAR = 1e-3  # nats between a token's log-prob as it was recorded and as its head has it


@dataclass
class Asked:
    """What is asked of the engine for one sample, and its answers."""

    top_k: int
    there: int  # tokens of the vocabulary, of which there may be fewer
    answers: list[Rows] = field(default_factory=list)


_asked: ContextVar[Asked | None] = ContextVar("slime_ext_asked", default=None)


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
    token = _asked.set(asked)
    try:
        sample = await rollout.generate(args, sample, sampling_params)
    finally:
        _asked.reset(token)
    _keep(sample, before, asked)
    return sample


def _asking(post: Callable[..., Any]) -> Callable[..., Any]:
    async def asking(url: str, payload: dict[str, Any], *given: Any, **named: Any) -> Any:
        asked = _asked.get()
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
    ids = torch.tensor([[entry[1] for entry in head] for head in heads], dtype=torch.int32)
    log_probs = torch.tensor([[entry[0] for entry in head] for head in heads], dtype=torch.float32)
    short = (0, top_k - ids.shape[1])
    return pad(ids, short), pad(log_probs, short, value=-torch.inf)


def _none(tokens: int, top_k: int) -> Rows:
    return torch.zeros(tokens, top_k, dtype=torch.int32), torch.full((tokens, top_k), -torch.inf)


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
    """A sample's heads, with none at the tokens behind them."""
    ids, log_probs = (getattr(sample, name, None) for name in FIELDS)
    if ids is None or log_probs is None:
        return _none(tokens, top_k)
    more = (0, 0, 0, tokens - len(ids))
    return pad(ids, more), pad(log_probs, more, value=-torch.inf)


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
            publish(rollout_id, samples, center.top_k)
        return log(rollout_id, args, samples, *given, **named)

    return log_rollout


def publish(rollout_id: int, samples: Iterable[Any], top_k: int) -> None:
    """Leaves the heads of a rollout's samples for the trainer.

    Raises:
        DataError: two samples of one index, or a token that counts without a head that fits it.
    """
    heads: dict[Any, Rows] = {}
    for sample in staleness.flat(samples):
        if sample.index is None or sample.index in heads:
            raise DataError(
                f"Sample.index: expected one of its own for every sample beside center, got {sample.index} "
                "again: the trainer finds a sample's head by it"
            )
        heads[sample.index] = _checked(sample, top_k)
    held[rollout_id] = heads
    if staleness.store() is not None:
        ray = sys.modules["ray"]
        held[rollout_id] = {index: ray.put(rows) for index, rows in heads.items()}
        found = ray.cloudpickle.dumps(held[rollout_id])
        staleness.leave(staleness.HEADS, rollout_id, found)
    for old in list(held)[: -staleness.WAITING[staleness.HEADS]]:
        del held[old]


def _checked(sample: Any, top_k: int) -> Rows:
    """A sample's heads. There is one at each token that counts, and it has the recorded log-prob for it."""
    count = sample.response_length
    ids, log_probs = _rows_of(sample, count, top_k)
    counts = torch.ones(count) if sample.loss_mask is None else torch.tensor(sample.loss_mask)
    lacking = (counts > 0) & (log_probs.amax(1) == -torch.inf)
    if lacking.any():
        raise DataError(
            f"{FIELDS[1]}, sample {sample.index}: expected a head at each response token that counts, got "
            f"none at token {int(lacking.int().argmax())}: sample it with {FLAG}"
        )
    sampled = torch.tensor(sample.tokens[len(sample.tokens) - count :], dtype=torch.int32)
    recorded = torch.tensor(sample.rollout_log_probs or [0.0] * count)
    own = (ids == sampled[:, None]) & (log_probs > -torch.inf) & (counts > 0)[:, None]
    apart = torch.where(own, log_probs - recorded[:, None], 0).abs().amax(1)
    if (apart > NEAR).any():
        at = int(apart.argmax())
        raise DataError(
            f"rollout_log_probs, sample {sample.index}, response token {at}: expected the log-prob that the "
            f"sampler's head has for it, got one {float(apart[at]):.3g} nats away: both must be of the same "
            "pass and temperature"
        )
    return ids, log_probs
