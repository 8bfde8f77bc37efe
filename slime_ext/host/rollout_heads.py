"""Requests the sampler's head in the rollout's process, and publishes it for the trainer.

``generate`` (``slime_ext.host.generate`` for --custom-generate-function-path) runs the host's own generate
function and asks SGLang for the head in the same request. The head stays with its sample, under slime's names
for it, until the host logs the rollout. Then it goes to Ray's object store.

With --rollout-top-p, the tokens that top-p leaves are the sampler's whole support. slime itself keeps their
ids and offsets, because its trainer normalises over them. ``generate`` adds their log-probs.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from slime_ext.errors import DataError, cut, warn_once
from slime_ext.host import published, wrapping
from slime_ext.host.configured import center_of_flags
from slime_ext.host.engine_answers import FLAT, NO_NUMBERS, OF_SUPPORT, none, read, read_support
from slime_ext.host.heads import HEADS, Rows, SupportRows
from slime_ext.host.rollout_data import flat
from slime_ext.hosts import contract
from slime_ext.ops.divergences import HIGHEST, is_log_prob

FIELDS = ("rollout_topk_token_ids", "rollout_topk_log_probs")  # of a sample, as in slime since 2e5cd7c
SUPPORT = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_top_p_log_probs")
NEAR = 1e-3  # nats: how far a token's recorded log-prob may be from the one in its head
MASS = 1.0001  # the most that a head's probabilities may add up to; float32 rounding stays below it
LEAST_MASS = 0.999  # the least that a support's probabilities must add up to
LARGE_TAIL = 0.1  # the most of the sampler's probability that a head should leave out
BLOCK = 2**20  # entries of supports per check, to bound memory
OURS = contract.OURS["custom_generate_function_path"]
NO_VOCABULARY = (
    "center: expected --vocab-size, or a config.json with vocab_size at --hf-checkpoint, got neither: set "
    "--vocab-size, because without it the ids of the sampler's head are not checked"
)


@dataclass
class Asked:
    """Holds the request to the engine for one sample, and the answers."""

    top_k: int
    there: int  # size of the vocabulary, which may be less than top_k
    top_p: float = 1.0  # below 1 the request asks for the support
    sample: Any = None  # index of the sample
    answers: list[Rows] = field(default_factory=list)
    supports: list[Tensor] = field(default_factory=list)


# The request for the sample that is being generated. This is a context variable, because several samples are
# generated at the same time.
ASKED: ContextVar[Asked | None] = ContextVar("slime_ext_asked", default=None)


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Runs the host's ``generate``, and asks for the sampler's head if the correction centers.

    If you have a generate function, call this one in it instead of the host's.

    Raises:
        DataError: the engine did not return the head of every token.
    """
    package = type(sample).__module__.partition(".")[0]
    rollout = importlib.import_module(f"{package}.rollout.sglang_rollout")
    center = center_of_flags(args)
    if evaluation or center is None:
        return await rollout.generate(args, sample, sampling_params)
    wrapping.wrap(rollout, "post", _asking)
    _publish_with_log(args)
    before = sample.response_length
    there, top_p = len(rollout.GenerateState(args).tokenizer), top_p_of(args)
    asked = Asked(center.top_k, there, top_p, sample.index)
    token = ASKED.set(asked)
    try:
        sample = await rollout.generate(args, sample, sampling_params)
    finally:
        ASKED.reset(token)
    (_keep if asked.top_p == 1 else _keep_support)(sample, before, asked)
    return sample


def top_p_of(args: Any) -> float:
    """Reads the probability mass that the sampler draws from; 1 is the whole vocabulary."""
    top_p = getattr(args, "rollout_top_p", None)
    return 1.0 if top_p is None else float(top_p)


def _asking(post: Callable[..., Any]) -> Callable[..., Any]:
    async def asking(url: str, payload: dict[str, Any], *positional: Any, **named: Any) -> Any:
        asked = ASKED.get()
        if asked is None or "sampling_params" not in payload:
            return await post(url, payload, *positional, **named)
        output = await post(url, payload | _request(payload["sampling_params"], asked), *positional, **named)
        if asked.top_p == 1:
            asked.answers.append(read(output["meta_info"], asked.top_k, asked.sample))
        else:
            asked.supports.append(read_support(output["meta_info"], asked.sample))
        return output

    return asking


def _request(sampling: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    """Returns the keys to add to a request.

    Raises:
        DataError: the request samples from other tokens than the head describes. The sampling parameters of a
            user's generate function can cause this.
    """
    for name, wanted in {"top_p": asked.top_p, "top_k": -1, "min_p": 0.0}.items():
        if (value := sampling.get(name, wanted)) not in (None, wanted):
            raise DataError(
                f"sampling_params.{name}, sample {asked.sample}: expected {wanted} beside center, got "
                f"{cut(str(value))}: set it to {wanted}, because the head must describe what the sampler "
                "draws from"
            )
    if asked.top_p == 1:
        return {"top_logprobs_num": min(asked.top_k, asked.there)} | FLAT
    custom = {**(sampling.get("custom_params") or {}), **OF_SUPPORT}
    return {"sampling_params": {**sampling, "custom_params": custom}}


def _keep(sample: Any, before: int, asked: Asked) -> None:
    """Adds the answers to the sample's heads. Tokens that the engine did not sample get none."""
    ids, log_probs = (torch.cat(parts) for parts in zip(none(0, asked.top_k), *asked.answers, strict=True))
    if len(ids) != sample.response_length - before:
        raise DataError(
            f"{FIELDS[1]}, sample {sample.index}: expected the heads of {sample.response_length - before} "
            f"new tokens, got {len(ids)}: keep the sampled tokens unchanged in your generate function, "
            "because code between the engine and the sample adds or drops tokens"
        )
    earlier = _rows_of(sample, before, asked.top_k)
    for name, *parts in zip(FIELDS, earlier, (ids, log_probs), strict=True):
        setattr(sample, name, torch.cat(parts))


def _keep_support(sample: Any, before: int, asked: Asked) -> None:
    """Appends the answers' log-probs to those of the sample. The host adds ids and offsets."""
    was = getattr(sample, SUPPORT[2], None)
    parts = [] if was is None else [_tensor(SUPPORT[2], sample, was).float()]
    setattr(sample, SUPPORT[2], torch.cat([*parts, torch.zeros(0), *asked.supports]))


def _rows_of(sample: Any, tokens: int, top_k: int) -> Rows:
    """Reads a sample's heads, and pads them with empty heads to the number of tokens.

    Raises:
        DataError: the heads are not [tokens or fewer, top_k] ids and log-probs.
    """
    columns = [getattr(sample, name, None) for name in FIELDS]
    if any(values is None for values in columns):
        return none(tokens, top_k)
    ids, log_probs = (_tensor(name, sample, values) for name, values in zip(FIELDS, columns, strict=True))
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
            f"{FIELDS[0]}, sample {sample.index}: expected whole numbers, got {ids.dtype}: write token ids"
        )
    more = (0, 0, 0, tokens - len(ids))
    return pad(ids.long(), more), pad(log_probs.float(), more, value=-torch.inf)


def _tensor(name: str, sample: Any, values: Any) -> Tensor:
    """Makes a CPU tensor from a sample's tensor, array or lists of numbers."""
    try:
        # A value in slime's tensor store has a method that loads it.
        values = values.load() if hasattr(values, "load") else values
        return torch.as_tensor(values).detach().cpu()
    except (*NO_NUMBERS, OSError):
        raise DataError(
            f"{name}, sample {sample.index}: expected numbers, one row or one number per response token, got "
            "something else: write them as slime_ext.host.generate does"
        ) from None


def _publish_with_log(args: Any) -> None:
    """Wraps the host's log function to publish heads before samples go to the trainer."""
    name = contract.LOG
    path = getattr(args, name, None) or contract.OURS[name]
    setattr(args, name, path)
    module, _, function = path.rpartition(".")
    wrapping.wrap(importlib.import_module(module), function, _publishing)


def _publishing(log: Callable[..., Any]) -> Callable[..., Any]:
    def log_rollout(
        rollout_id: int, args: Any, samples: Sequence[Any], *positional: Any, **named: Any
    ) -> Any:
        publish_if_centered(rollout_id, args, samples)
        return log(rollout_id, args, samples, *positional, **named)

    return log_rollout


def publish_if_centered(rollout_id: int, args: Any, samples: Sequence[Any]) -> None:
    """Publishes the samples' heads or supports if the correction of the flags centers."""
    if (center := center_of_flags(args)) is not None:
        is_exact = top_p_of(args) != 1
        publish(rollout_id, samples, center.top_k, vocabulary_of(args), is_exact=is_exact)


def vocabulary_of(args: Any) -> int | None:
    """Finds the number of the model's token ids. Returns None if it is not known.

    It comes from Megatron's flags, or from the ``config.json`` of --hf-checkpoint.
    """
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


def publish(
    rollout_id: int,
    samples: Iterable[Any],
    top_k: int,
    vocabulary: int | None = None,
    *,
    is_exact: bool = False,
) -> None:
    """Publishes the heads, or the supports, of a rollout's samples for the trainer.

    Args:
        vocabulary: the number of the model's token ids. None: ids have no upper bound.
        is_exact: whether the sampler drew from the supports that the samples hold.

    Raises:
        DataError: two samples have one index, or a token in the loss mask lacks a valid head that fits its
            recorded log-prob.
    """
    heads: dict[Any, Rows | SupportRows] = {}
    for sample in flat(samples):
        if sample.index is None or sample.index in heads:
            raise DataError(
                f"Sample.index: expected a different one for every sample beside center, got {sample.index} "
                "again: number the samples, because the trainer finds a sample's head by its index"
            )
        heads[sample.index] = (
            _checked_support(sample, vocabulary) if is_exact else _checked(sample, top_k, vocabulary)
        )
    _warn_of_tail(heads.values(), top_k)
    HEADS.value[rollout_id] = heads
    if published.store() is not None:
        ray = sys.modules["ray"]
        HEADS.value[rollout_id] = {index: ray.put(rows) for index, rows in heads.items()}
        pickled = ray.cloudpickle.dumps(HEADS.value[rollout_id])
        published.store_for_trainer(published.HEADS, rollout_id, pickled)
    for past in list(HEADS.value)[: -published.WAITING[published.HEADS]]:
        del HEADS.value[past]


def _warn_of_tail(heads: Iterable[tuple[Tensor, ...]], top_k: int) -> None:
    """Warns before the first step if heads are too small. Later the trainer's metric shows it."""
    tables = [rows[1] for rows in heads if len(rows) == 2]
    masses = [table.double().exp().sum(1)[(table > -torch.inf).any(1)] for table in tables]
    if masses and (all_of_them := torch.cat(masses)).numel() and float(all_of_them.mean()) < 1 - LARGE_TAIL:
        warn_once(
            f"center.top_k: expected a head with at least {1 - LARGE_TAIL:.0%} of the sampler's probability, "
            f"got {top_k} tokens with less on average: raise center.top_k and watch "
            "off_policy/tail_fraction, because center has to model the rest"
        )


class Response(NamedTuple):
    """Holds a sample's data at its response tokens, [R] each."""

    counts: Tensor  # bool, whether the token is in the loss mask
    sampled: Tensor  # the token's id
    recorded: Tensor  # the token's recorded log-prob


def _response(sample: Any) -> Response:
    count = sample.response_length
    counts = torch.ones(count) if sample.loss_mask is None else _column("loss_mask", sample, sample.loss_mask)
    sampled = _column("tokens", sample, sample.tokens[len(sample.tokens) - count :])
    recorded = sample.rollout_log_probs
    if recorded is None or len(recorded) == 0:
        recorded = [0.0] * count
    return Response(counts > 0, sampled, _column("rollout_log_probs", sample, recorded))


def _checked(sample: Any, top_k: int, vocabulary: int | None) -> Rows:
    """Reads and checks a sample's heads.

    Each token in the loss mask must have a valid head, which agrees with its recorded log-prob. An entry that
    is no log-prob, such as -inf, counts as absent.
    """
    ids, log_probs = _rows_of(sample, sample.response_length, top_k)
    log_probs = _checked_rows(sample, _response(sample), ids, log_probs, Where("head", FIELDS), vocabulary)
    return ids.int(), log_probs


def _checked_support(sample: Any, vocabulary: int | None) -> SupportRows:
    """Reads and checks a sample's supports.

    Each token in the loss mask must have a valid support, which contains the sampled token.
    """
    ids, offsets, log_probs = _ragged(sample)
    response, widths = _response(sample), offsets.diff().tolist()
    for rows in _blocks(widths):
        entries, sizes = slice(int(offsets[rows.start]), int(offsets[rows.stop])), widths[rows]
        of_ids, of_log_probs = (list(torch.split(values[entries], sizes)) for values in (ids, log_probs))
        table = pad_sequence(of_ids, True), pad_sequence(of_log_probs, True, -torch.inf)
        of_rows = Response(*(values[rows] for values in response))
        where = Where("support", SUPPORT[::2], rows.start)
        _checked_rows(sample, of_rows, *table, where, vocabulary)
    return ids.int(), offsets, torch.where(is_log_prob(log_probs), log_probs, -torch.inf)


def _ragged(sample: Any) -> SupportRows:
    """Reads a sample's supports, joined, and the offset at which each begins.

    Raises:
        DataError: the sample lacks one of the fields, or the fields do not fit each other.
    """
    count, columns = sample.response_length, [getattr(sample, name, None) for name in SUPPORT]
    lacking = next((name for name, values in zip(SUPPORT, columns, strict=True) if values is None), None)
    if lacking is not None and count == 0:
        return torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.zeros(0)
    if lacking is not None:
        raise DataError(
            f"{lacking}, sample {sample.index}: expected the tokens that --rollout-top-p leaves at each "
            f"response token, got none: record {', '.join(SUPPORT)} in your generate function, as slime's "
            f"own does with {OURS}"
        )
    ids, offsets, log_probs = (_tensor(name, sample, v) for name, v in zip(SUPPORT, columns, strict=True))
    whole = not any(values.is_floating_point() or values.is_complex() for values in (ids, offsets))
    fits = whole and offsets.shape == (count + 1,) and ids.dim() == 1 and log_probs.shape == ids.shape
    if fits:
        offsets = offsets.long()
        rises = bool((offsets.diff() >= 0).all()) and int(offsets[0]) == 0
        fits = rises and int(offsets[-1]) == len(ids)
    if not fits:
        raise DataError(
            f"{SUPPORT[1]}, sample {sample.index}: expected {count + 1} whole numbers that rise from 0 to "
            f"the length of the other two fields, got shapes {list(offsets.shape)}, {list(ids.shape)} and "
            f"{list(log_probs.shape)}: write one row per response token, and an empty row for a token that "
            "the engine did not draw"
        )
    return ids.long(), offsets, log_probs.float()


def _blocks(widths: Sequence[int]) -> Iterator[slice]:
    """Splits rows into blocks of at most ``BLOCK`` table entries, or of one row."""
    start, widest = 0, 0
    for row, width in enumerate(widths):
        widest = max(widest, width)
        if row > start and widest * (row + 1 - start) > BLOCK:
            yield slice(start, row)
            start, widest = row, width
    if widths:
        yield slice(start, len(widths))


class Where(NamedTuple):
    """Names a table in messages: its kind, its fields, and the token of its first row."""

    what: str
    fields: tuple[str, ...]
    first: int = 0


def _checked_rows(
    sample: Any, response: Response, ids: Tensor, log_probs: Tensor, where: Where, vocabulary: int | None
) -> Tensor:
    """Checks rows of ids and log-probs.

    Returns:
        The log-probs [R, K], with -inf for absent entries.

    Raises:
        DataError: a token in the loss mask has no row, a row that is no part of a distribution, or a row that
            disagrees with the recorded log-prob.
    """
    _check_sound(sample, response.counts, ids, log_probs, where, vocabulary)
    counts, what = response.counts, where.what
    log_probs = torch.where(is_log_prob(log_probs), log_probs, -torch.inf)
    lacking = counts & ~(log_probs > -torch.inf).any(1)
    if lacking.any():
        raise DataError(
            f"{where.fields[1]}, sample {sample.index}: expected a {what} at each response token in "
            f"the loss mask, got none at token {where.first + _first(lacking)}: sample it with "
            f"{contract.GENERATE_FLAG}"
        )
    is_sampled = (ids == response.sampled[:, None]) & (log_probs > -torch.inf) & counts[:, None]
    if what == "support" and (outside := counts & ~is_sampled.any(1)).any():
        raise DataError(
            f"{where.fields[0]}, sample {sample.index}, response token {where.first + _first(outside)}: "
            "expected the sampled token in the sampler's support, got only other tokens: record the support "
            "in the request that draws the token, because the sampler drew from more than was recorded"
        )
    off = torch.where(is_sampled, log_probs - response.recorded[:, None], 0).abs()
    apart = off.amax(1) if off.shape[1] else off.new_zeros(len(off))
    if (apart > NEAR).any():
        at = int(apart.argmax())
        raise DataError(
            f"rollout_log_probs, sample {sample.index}, response token {where.first + at}: expected the "
            f"token's log-prob in the sampler's {what}, got one {float(apart[at]):.3g} nats away: record "
            "both in the same pass and at the same temperature"
        )
    return log_probs


def _check_sound(
    sample: Any, counts: Tensor, ids: Tensor, log_probs: Tensor, where: Where, vocabulary: int | None
) -> None:
    """Raises DataError at the first row that is no part of a distribution.

    Only tokens in the loss mask are checked.
    """
    there, last = is_log_prob(log_probs), (1 << 31 if vocabulary is None else vocabulary) - 1
    mass = torch.where(there, log_probs, -torch.inf).double().exp().sum(1)
    # Absent entries get distinct negative numbers, so that they repeat no id.
    distinct = torch.where(there, ids, -1 - torch.arange(ids.shape[1])).sort(1).values
    twice = distinct[:, 1:] == distinct[:, :-1]
    of_ids, of_log_probs = where.fields
    over = "whole vocabulary" if where.what == "head" else "support"
    logits = log_probs > HIGHEST
    foreign = there & ((ids < 0) | (ids > last))
    faults = [
        (
            of_log_probs,
            "numbers",
            "NaN",
            log_probs.isnan(),
            "look for an overflow in the engine's forward pass",
        ),
        (of_log_probs, "log-probs of at most 0", "one above", logits, "write log-probs, not logits"),
        (of_ids, f"ids from 0 to {last}", "another", foreign, "write ids of the model's tokens"),
        (of_ids, "each id once", "one twice", twice, "remove one, because its probability would count twice"),
        (
            of_log_probs,
            "probabilities that add up to at most 1",
            "more",
            (mass > MASS)[:, None],
            f"normalise them over the {over}, at the temperature of sampling",
        ),
    ]
    if where.what == "support":
        short = there.any(1) & (mass < LEAST_MASS)
        why = "normalise them over the support, not over the whole vocabulary"
        faults.append((of_log_probs, "probabilities that add up to 1", "less", short[:, None], why))
    for name, wanted, got, flags, why in faults:
        if (wrong := counts & flags.any(1)).any():
            raise DataError(
                f"{name}, sample {sample.index}, response token {where.first + _first(wrong)}: expected "
                f"{wanted} in the sampler's {where.what}, got {got}: {why}"
            )


def _column(name: str, sample: Any, values: Any) -> Tensor:
    """Reads a column of a sample, one number per response token."""
    numbers, count = _tensor(name, sample, values), sample.response_length
    if numbers.shape != (count,):
        raise DataError(
            f"{name}, sample {sample.index}: expected {count} numbers, one per response token, got shape "
            f"{list(numbers.shape)}: write one per token, because center reads them beside the sampler's head"
        )
    return numbers


def _first(flags: Tensor) -> int:
    return int(flags.int().argmax())
