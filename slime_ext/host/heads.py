"""The sampler's head on its way to the loss: its K most likely tokens at each response token, for ``center``.

In the rollout's process ``generate`` (``slime_ext.host.generate`` for --custom-generate-function-path) runs
the host's own generate function and asks SGLang for the head in the same request. The head stays with its
sample, under the names that slime has for it, until the host logs the rollout; then it goes to Ray's object
store, where the trainer finds it by the sample's index. ``at_logits`` makes the trainer's log-probs of the
same tokens from the logits that the policy loss sees.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from slime_ext.config.load import read_config
from slime_ext.core.state import Head
from slime_ext.errors import ConfigError, DataError
from slime_ext.host import contract, hosts, staleness, step_metrics
from slime_ext.host.configured import mapping_of_flags
from slime_ext.host.packing import context_parallel, pack_segments, sum_over
from slime_ext.host.rollout_data import Samples
from slime_ext.ops.segments import to_device
from slime_ext.ops.vocabulary import log_probs_at

Rows = tuple[Tensor, Tensor]  # ids [R, K] int32 and log-probs [R, K] float32, -inf where there is none
FIELDS = ("rollout_topk_token_ids", "rollout_topk_log_probs")  # of a sample, as in slime since 2e5cd7c
ENGINE, RESPONSES = "sglang_router_ip", "get_responses"
HEADS, WAITING = "heads", 4  # rollouts whose heads wait for the trainer
NEAR = 1e-3  # nats between a token's log-prob as it was recorded and as its head has it
FLAG = f"{contract.flag_of('custom_generate_function_path')} slime_ext.host.generate"


@dataclass
class Asked:
    """What is asked of the engine for one sample, and its answers."""

    top_k: int
    there: int  # tokens of the vocabulary, of which there may be fewer
    answers: list[Rows] = field(default_factory=list)


_asked: ContextVar[Asked | None] = ContextVar("slime_ext_asked", default=None)
_held: dict[int, dict[Any, Any]] = {}  # rollout -> sample index -> rows, or Ray's reference to them


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """The host's own ``generate``, with the sampler's head where a correction centers.

    A generate function of your own calls this one in place of the host's.

    Raises:
        DataError: the engine did not answer with the head of every token.
    """
    package = type(sample).__module__.partition(".")[0]
    rollout = importlib.import_module(f"{package}.rollout.sglang_rollout")
    center = read_config(mapping_of_flags(args)).correction.center
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
    name = staleness.LOG
    path = getattr(args, name, None) or contract.OURS[name]
    setattr(args, name, path)
    module, _, function = path.rpartition(".")
    hosts.wrap(importlib.import_module(module), function, _publishing)


def _publishing(log: Callable[..., Any]) -> Callable[..., Any]:
    def log_rollout(rollout_id: int, args: Any, samples: Sequence[Any], *given: Any, **named: Any) -> Any:
        publish(rollout_id, samples, read_config(mapping_of_flags(args)).correction.center.top_k)
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
    _held[rollout_id] = heads
    if staleness.store() is not None:
        ray = sys.modules["ray"]
        _held[rollout_id] = {index: ray.put(rows) for index, rows in heads.items()}
        found = ray.cloudpickle.dumps(_held[rollout_id])
        staleness.leave(HEADS, rollout_id, found, WAITING)
    for old in list(_held)[:-WAITING]:
        del _held[old]


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


def of_step(rollout_id: int, samples: Samples, top_k: int) -> list[Rows]:
    """The heads of an optimizer step's samples, in their order.

    Raises:
        DataError: one that ``publish`` did not see, or of another width.
    """
    held = _held.get(rollout_id) or {}
    if not held and (data := staleness.left(HEADS, rollout_id)):
        held = sys.modules["ray"].cloudpickle.loads(data)
    lacking = [index for index in samples.indices if index not in held]
    if lacking:
        raise DataError(
            f"center: expected the sampler's head of every sample of rollout {rollout_id}, got none of "
            f"{len(lacking)} of {len(samples.indices)}, the first is {lacking[0]}: sample them with {FLAG}"
        )
    found = [held[index] for index in samples.indices]
    if found and not isinstance(found[0], tuple):
        found = sys.modules["ray"].get(found)
    for ids, _ in found:
        if ids.shape[1] != top_k:
            raise DataError(
                f"center.top_k: expected {ids.shape[1]}, as in the rollout, got {top_k}: both read the same "
                "configuration"
            )
    return found


def at_logits(given: Sequence[Any], named: Mapping[str, Any], inputs: Mapping[str, Any]) -> Head | None:
    """The head of a micro-batch's local response tokens; None unless the optimizer step has heads.

    Args:
        given, named: of the call of ``get_log_probs_and_entropy``.
        inputs: of the policy loss that is running.

    Raises:
        DataError: the samples are not those of the step.
    """
    step = step_metrics.current.step
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
    segments = pack_segments(
        *(batch[key] for key in ("loss_masks", "total_lengths", "response_lengths")),
        batch.get("max_seq_lens"),
        cp_rank=here.rank,
        cp_size=here.size,
    )
    parts = [(step.heads[places[i]], start, stop) for i, start, stop, _ in segments.local_shards]
    ids, sampler = (
        to_device(torch.cat([rows[n][start:stop] for rows, start, stop in parts]), logits.device)
        for n in (0, 1)
    )
    return Head(sampler, _trainer(logits, ids, named))


def _trainer(logits: Tensor, ids: Tensor, named: Mapping[str, Any]) -> Tensor:
    """[T, K] the trainer's log-probs of the tokens ``ids`` at T local response tokens, with grad."""
    rows = _rows_that_respond(logits, named)
    flat = logits.reshape(-1, logits.shape[-1])
    if (temperature := getattr(named["args"], "rollout_temperature", 1.0)) != 1.0:
        flat = flat / temperature
    # Of all rows, then those that respond: of the logits no copy is made, and their gradient is written once.
    at_rows = ids.new_zeros(len(flat), ids.shape[1]).index_copy(0, rows, ids)
    return log_probs_at(flat, at_rows, **_share(logits.shape[-1])).index_select(0, rows)


def _rows_that_respond(logits: Tensor, named: Mapping[str, Any]) -> Tensor:
    """[T] int64, the row of the logits that makes each local response token: the host's own function cuts row
    numbers as it cuts logits, in whatever layout."""
    host = hosts.current()
    assert host is not None
    cut = hosts.function_of(host.name, RESPONSES)
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
    state = hosts.parallel_state()
    if state is None or (parts := state.get_tensor_model_parallel_world_size()) == 1:
        return {}
    part = state.get_tensor_model_parallel_rank()
    all_sum = sum_over(state.get_tensor_model_parallel_group())
    return {"offset": part * width, "part": part, "parts": parts, "all_sum": all_sum}


def require_host(args: Any, host: hosts.Host) -> None:
    """Fails at start-up where the sampler's head cannot reach the loss.

    Raises:
        ConfigError: naming what this host lacks.
    """
    lacks = {
        f"{hosts.STEP} (Megatron's trainer)": host.step is None,
        f"{RESPONSES} among its loaded modules": hosts.function_of(host.name, RESPONSES) is None,
        f"{contract.flag_of(staleness.LOG)} (slime since v0.2.2)": not hasattr(args, staleness.LOG),
        "SGLang as its engine": not hasattr(args, ENGINE),
    }
    for what, is_lacking in lacks.items():
        if is_lacking:
            raise ConfigError(
                f"slime_ext.center: expected a host with {what}, got {host.name} {host.version} without: the "
                "sampler's head does not reach the loss there"
            )
