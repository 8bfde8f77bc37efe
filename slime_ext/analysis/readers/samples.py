"""Samples of any format -> one ``Rollout``. Work per sample, never per token."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy
import torch
from torch import Tensor

from slime_ext.analysis.document import Skipped
from slime_ext.analysis.records import DumpedRollout
from slime_ext.host.contract import MOST_DIGITS, number_of
from slime_ext.ops.segments import Segments

LONGEST, MESSAGES = 200_000, 1000  # characters and chat messages of a prompt or a response that are kept
UNKNOWN = -1  # version of the weights of a token
NO_NUMBERS = (TypeError, ValueError, RuntimeError, OverflowError)  # what ``as_tensor`` may raise
# What a row has for each token of its response -> as what, and what stands for a row without.
FIELDS: dict[str, tuple[torch.dtype, float]] = {
    "behavior": (torch.float32, torch.nan),
    "proximal": (torch.float32, torch.nan),
    "mask": (torch.float32, 1.0),
    "tokens": (torch.int64, UNKNOWN),
    "advantages": (torch.float32, 0.0),
    "entropy": (torch.float32, torch.nan),
    "reference": (torch.float32, torch.nan),
    "kept": (torch.float32, torch.nan),
    "overlap": (torch.float32, torch.nan),
}
ALWAYS = ("behavior", "proximal", "mask")  # those of FIELDS that every rollout has


@dataclass
class DumpedSample:
    """One sample as its file has it: lists or tensors over the response ([R]); what the file lacks is as
    here."""

    position: int
    response_length: int
    behavior: Any = None
    proximal: Any = None
    mask: Any = None
    tokens: Any = None
    advantages: Any = None
    entropy: Any = None
    reference: Any = None
    kept: Any = None
    overlap: Any = None
    routed: Any = None  # experts of the side that wrote the file, [tokens, layers, active]
    index: int | None = None  # of the sample in the run
    status: str = ""
    token_sum: int | None = None  # of all tokens, see ``checksum``
    prompt_length: int = 0
    reward: float | None = None
    group: int | None = None
    step: int | None = None
    prompt: str = ""
    response: str = ""
    weight_versions: Sequence[str] = ()
    token_versions: Sequence[str] = ()


@dataclass
class Notes:
    """Remarks about samples, of which those of one kind become one line: how many, and the first."""

    kinds: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, row: DumpedSample, more: str = "") -> None:
        self.kinds.setdefault(kind, []).append(f"position {row.position}{more}")

    def lines(self) -> tuple[str, ...]:
        return tuple(f"samples {kind}: {len(v)}, first {v[0]}" for kind, v in self.kinds.items())


def assemble(
    rollout_id: int,
    source: str,
    rows: Sequence[DumpedSample],
    notes: Notes | None = None,
    **whole: Any,
) -> DumpedRollout | Skipped:
    """One rollout from samples, without those whose lists do not fit.

    Args:
        notes: what is known to be amiss already.
        whole: fields of ``DumpedRollout`` that are not of one sample.
    """
    if not rows:
        return Skipped(source, "holds no sample")
    if reason := _without_log_probs(rows):
        return Skipped(source, reason)
    notes = notes or Notes()
    sound = [row for row in rows if _fits(row, notes)]
    if not sound:
        return Skipped(source, "no sample with a list of numbers for its response; " + notes.lines()[0])
    packed = {name: _packed(sound, name) for name in FIELDS}
    mask = packed.pop("mask") != 0
    versions = _versions(sound, mask, notes)
    return DumpedRollout(
        rollout_id=rollout_id,
        source=source,
        lengths=tuple(row.response_length for row in sound),
        prompt_lengths=tuple(row.prompt_length for row in sound),
        positions=tuple(row.position for row in sound),
        mask=mask,
        **packed,
        rewards=_rewards(sound),
        versions=versions,
        newest=None if versions is None else _newest(versions),
        groups=_all([row.group for row in sound]),
        steps=_all([row.step for row in sound]),
        prompts=[row.prompt for row in sound],
        responses=[row.response for row in sound],
        notes=notes.lines(),
        **whole,
    )


def _without_log_probs(rows: Sequence[DumpedSample]) -> str | None:
    if all(row.proximal is None for row in rows):
        return (
            "has no log-probs of the trainer (log_probs): give the train dump of the same rollout too; slime "
            "v0.3.0 and v0.3.1 write them only if they are recomputed (--get-mismatch-metrics)"
        )
    if all(row.behavior is None for row in rows):
        return "has no log-probs of the sampler (rollout_log_probs): slime records them with --use-tis"
    return None


def _fits(row: DumpedSample, notes: Notes) -> bool:
    if row.proximal is None:
        notes.add("without log-probs of the trainer, left out", row)
        return False
    for name, (dtype, _) in FIELDS.items():
        values = getattr(row, name)
        if values is None:
            continue
        try:
            found = as_tensor(values, dtype)
        except NO_NUMBERS:
            notes.add("whose lists hold something else than numbers, left out", row, f": {name}")
            return False
        if len(found) != row.response_length:
            notes.add(
                "whose lists have another length than the response, left out",
                row,
                f" has {len(found)} of {name} for {row.response_length} tokens",
            )
            return False
        setattr(row, name, found)
    if row.behavior is None:
        notes.add("without log-probs of the sampler", row)
    return True


def _packed(rows: Sequence[DumpedSample], name: str) -> Tensor | None:
    """A field of all rows in one flat tensor, taken from them, so that it is not in memory twice; None where
    no row has it and a rollout need not."""
    if name not in ALWAYS and all(getattr(row, name) is None for row in rows):
        return None
    dtype, missing = FIELDS[name]
    lengths = [row.response_length for row in rows]
    out = torch.empty(sum(lengths), dtype=dtype)
    for row, own in zip(rows, out.split(lengths), strict=True):
        values = getattr(row, name)
        own.fill_(missing) if values is None else own.copy_(values)
        setattr(row, name, None)
    return out


def as_tensor(values: Any, dtype: torch.dtype) -> Tensor:
    """A CPU tensor [R] from a list, in which None means NaN, or from a tensor.

    Raises:
        TypeError, ValueError, RuntimeError, OverflowError: something else than a list of numbers.
    """
    if isinstance(values, Tensor):
        return values.detach().reshape(-1).to("cpu", dtype)
    if isinstance(values, (list, tuple)):
        return _of_list(values, dtype)
    found = torch.tensor(values, dtype=dtype)
    if found.dim() != 1:
        raise ValueError(f"expected a list of numbers, got one of shape {list(found.shape)}")
    return found


def _of_list(values: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """Raises TypeError for a list of lists, before one of them is looked into."""
    code = "q" if dtype == torch.int64 else "d"
    try:
        found = array(code, values)
    except TypeError:
        found = array(code, [torch.nan if v is None else v for v in values])
    return torch.from_numpy(numpy.array(found)).to(dtype)


def _rewards(rows: list[DumpedSample]) -> Tensor | None:
    if all(row.reward is None for row in rows):
        return None
    return torch.tensor([torch.nan if r.reward is None else r.reward for r in rows], dtype=torch.float64)


def _all(values: list[int | None]) -> tuple[int, ...] | None:
    return None if any(v is None for v in values) else tuple(values)  # type: ignore[arg-type]


def rollout_number(value: Any) -> int:
    """A rollout number from what a file calls its rollout.

    Raises:
        TypeError, ValueError, OverflowError: it is no number, or one of more digits than an int64 holds.
    """
    found = int(value)
    if abs(found) >= 10**MOST_DIGITS:
        raise ValueError(f"expected a rollout number of at most {MOST_DIGITS} digits, got a longer one")
    return found


def _number(version: Any) -> int:
    found = number_of(version)
    return UNKNOWN if found is None else found


def _versions(rows: list[DumpedSample], mask: Tensor, notes: Notes) -> Tensor | None:
    if not any(row.weight_versions or row.token_versions for row in rows):
        return None
    out = torch.full(mask.shape, UNKNOWN, dtype=torch.int64)
    lengths = [row.response_length for row in rows]
    for row, own, own_mask in zip(rows, out.split(lengths), mask.split(lengths), strict=True):
        _fill(own, row, own_mask, notes)
    return out


def _fill(out: Tensor, row: DumpedSample, mask: Tensor, notes: Notes) -> None:
    """Writes the weight version of each token of a sample to ``out``."""
    per_token = row.token_versions
    if len(per_token) == len(out) and len(out):
        runs = [(_number(version), sum(1 for _ in run)) for version, run in groupby(per_token)]
        numbers, counts = zip(*runs, strict=True)
        out.copy_(torch.tensor(numbers).repeat_interleave(torch.tensor(counts)))
        return
    numbers = [_number(version) for version in row.weight_versions]
    if len(set(numbers)) <= 1:
        out.fill_(numbers[0] if numbers else UNKNOWN)
        return
    turns = Segments.whole([len(out)], mask).turn_ids
    if len(out) and int(turns[-1]) == len(numbers):  # one call of the engine for each turn
        out.copy_(torch.tensor(numbers)[(turns - 1).clamp_min(0)])
        return
    out.fill_(min(numbers))
    notes.add("that mix weight versions and do not say where, counted as the oldest", row)


def _newest(versions: Tensor) -> int | None:
    newest = int(versions.max()) if len(versions) else UNKNOWN
    return None if newest == UNKNOWN else newest


def sample_of(sample: Mapping[str, Any], position: int, step: int | None = None) -> DumpedSample:
    """One sample from a row under slime's plural names."""
    length = int(sample["response_lengths"])
    tokens = sample.get("tokens")
    prompt_length = int(sample.get("total_lengths") or (length if tokens is None else len(tokens))) - length
    reward = sample.get("local_raw_reward")
    return DumpedSample(
        position=position,
        response_length=length,
        behavior=sample.get("rollout_log_probs"),
        proximal=sample.get("log_probs"),
        mask=sample.get("loss_masks"),
        tokens=None if tokens is None else tokens[prompt_length : prompt_length + length],
        advantages=sample.get("advantages"),
        entropy=sample.get("entropy"),
        reference=sample.get("ref_log_probs"),
        kept=kept_sizes(sample, length, tokens),
        routed=sample.get("routed_experts"),
        token_sum=checksum(tokens),
        prompt_length=prompt_length,
        reward=number(sample.get("rewards") if reward is None else reward),
        step=step,
    )


def checksum(tokens: Any) -> int | None:
    """A number that differs where tokens or their order do, but for chance; None for no tokens."""
    try:
        found = as_tensor(tokens, torch.int64)
    except NO_NUMBERS:
        return None
    return int((found * torch.arange(1, len(found) + 1)).sum())


def kept_sizes(sample: Mapping[str, Any], length: int, tokens: Any) -> Tensor | None:
    """``DumpedRollout.kept`` of one sample, from slime's replay keys: of response token i the kept ids are
    ids[offsets[i]:offsets[i + 1]] (slime/utils/types.py at 624b824)."""
    ids, offsets = (sample.get(f"rollout_top_p_token_{name}") for name in ("ids", "offsets"))
    try:
        ids, offsets, drawn = (as_tensor(values, torch.int64) for values in (ids, offsets, tokens))
    except NO_NUMBERS:
        return None
    sizes, drawn = offsets.diff(), drawn[len(drawn) - length :]
    if not len(drawn) == len(sizes) == length or int(sizes.sum()) != len(ids) or bool((sizes < 0).any()):
        return None
    at = torch.repeat_interleave(sizes)
    is_in = torch.zeros(length).index_add(0, at, (ids == drawn[at]).float()) > 0
    return torch.where(sizes == 0, torch.nan, torch.where(is_in, sizes, -sizes).float())


def number(value: Any) -> float | None:
    """A reward as a number; None for a mapping of rewards or for none."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def text(value: Any) -> str:
    """A prompt as text, from text or a list of chat messages; half a surrogate pair, which no file can
    hold, becomes a question mark."""
    return _text(value).encode("utf-8", "replace").decode()


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value[:LONGEST]
    if not isinstance(value, (list, tuple)):
        return ""
    parts = (part.get("content", "") if isinstance(part, dict) else part for part in value[:MESSAGES])
    return "\n".join(part[:LONGEST] for part in parts if isinstance(part, str))[:LONGEST]
