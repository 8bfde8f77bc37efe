"""Samples of any format -> one ``DumpedRollout``.

A rollout may hold thousands of short samples: per sample only the fields are looked at, whatever is computed
is computed over the packed tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

import numpy
import torch
from torch import Tensor

from slime_ext.host.contract import MOST_DIGITS, number_of
from slime_ext.ops.segments import Segments
from slime_ext.tools.analysis.document import Skipped
from slime_ext.tools.analysis.records import DumpedRollout

UNKNOWN = -1  # version of the weights of a token
NO_NUMBERS = (TypeError, ValueError, RuntimeError, OverflowError)  # what ``as_tensor`` may raise
# Field of a row, one value per response token -> dtype, and the value for rows without the field.
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
    """One sample as its file has it: lists or tensors over the response ([R]), defaults for what it lacks."""

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
    token_sum: int | None = None  # of all tokens, see ``checksums``
    prompt_length: int = 0
    reward: float | None = None
    group: int | None = None
    step: int | None = None
    cached: int | None = None  # tokens of the prompt
    prompt: str = ""
    response: str = ""
    weight_versions: Sequence[str] = ()
    token_versions: Sequence[str] = ()


@dataclass
class Notes:
    """Remarks about samples; those of one kind become one line with their number and the first."""

    kinds: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, row: DumpedSample, more: str = "") -> None:
        self.kinds.setdefault(kind, []).append(f"sample {row.position}{more}")

    def lines(self) -> tuple[str, ...]:
        return tuple(
            f"{len(v)} sample{'s' * (len(v) > 1)} {kind} (first: {v[0]})" for kind, v in self.kinds.items()
        )


def assemble(
    rollout_id: int, source: str, rows: Sequence[DumpedSample], notes: Notes | None = None, **whole: Any
) -> DumpedRollout | Skipped:
    """One rollout from samples, without those whose lists do not fit.

    Args:
        notes: remarks of the caller, to which this adds its own.
        whole: fields of ``DumpedRollout`` that are not of one sample.
    """
    notes = notes or Notes()
    if reason := _missing(rows):
        return Skipped(source, reason)
    sound = [row for row in rows if _fits(row, notes)]
    if not sound:
        return Skipped(source, "no sample with a list of numbers for its response; " + notes.lines()[0])
    packed = {name: _packed(sound, name) for name in FIELDS}
    mask = packed.pop("mask") != 0
    versions = _versions(sound, mask, notes)
    newest = UNKNOWN if versions is None or not len(versions) else int(versions.max())
    rewards = [torch.nan if row.reward is None else row.reward for row in sound]
    return DumpedRollout(
        rollout_id=rollout_id,
        source=source,
        lengths=tuple(row.response_length for row in sound),
        prompt_lengths=tuple(row.prompt_length for row in sound),
        positions=tuple(row.position for row in sound),
        mask=mask,
        **packed,
        rewards=None
        if all(row.reward is None for row in sound)
        else torch.tensor(rewards, dtype=torch.float64),
        versions=versions,
        newest=None if newest == UNKNOWN else newest,
        groups=_all([row.group for row in sound]),
        steps=_all([row.step for row in sound]),
        cached=_all([row.cached for row in sound]),
        prompts=[row.prompt for row in sound],
        responses=[row.response for row in sound],
        left_out=len(rows) - len(sound),
        notes=notes.lines(),
        **whole,
    )


def _missing(rows: Sequence[DumpedSample]) -> str:
    if not rows:
        return "holds no sample"
    if all(row.proximal is None for row in rows):
        return (
            "has no log-probs of the trainer (log_probs): give the train dump of the same rollout too; slime "
            "v0.3.0 and v0.3.1 write them only if they are recomputed (--get-mismatch-metrics)"
        )
    if all(row.behavior is None for row in rows):
        return "has no log-probs of the sampler (rollout_log_probs): slime records them with --use-tis"
    return ""


def _fits(row: DumpedSample, notes: Notes) -> bool:
    if row.proximal is None:
        notes.add("skipped: no log-probs of the trainer", row)
        return False
    for name, (dtype, _) in FIELDS.items():
        values = getattr(row, name)
        if values is None or (isinstance(values, Tensor) and values.shape == (row.response_length,)):
            continue
        try:
            found = as_tensor(values, dtype)
        except NO_NUMBERS:
            notes.add("skipped: a list holds something else than numbers", row, f", {name}")
            return False
        if len(found) != row.response_length:
            lengths = f", {name} {len(found)}, response {row.response_length}"
            notes.add("skipped: list length differs from the response", row, lengths)
            return False
        setattr(row, name, found)
    if row.behavior is None:
        notes.add("without log-probs of the sampler", row)
    return True


def _packed(rows: Sequence[DumpedSample], name: str) -> Tensor | None:
    """A field of all rows in one flat tensor, removed from the rows so that it is in memory once; None where
    no row has it and a rollout need not."""
    if name not in ALWAYS and all(getattr(row, name) is None for row in rows):
        return None
    dtype, missing = FIELDS[name]
    parts = []
    for row in rows:
        values = getattr(row, name)
        parts.append(torch.full((row.response_length,), missing) if values is None else values)
        setattr(row, name, None)
    return torch.cat([part.to(dtype) for part in parts])


def as_tensor(values: Any, dtype: torch.dtype) -> Tensor:
    """A CPU tensor [R] from a list, in which None means NaN, an array or a tensor.

    Raises:
        TypeError, ValueError, RuntimeError, OverflowError: something else than a list of numbers.
    """
    if isinstance(values, Tensor):
        return values.detach().reshape(-1).to("cpu", dtype)
    if isinstance(values, (list, tuple)):
        code = "q" if dtype == torch.int64 else "d"
        try:
            found = array(code, values)
        except TypeError:
            found = array(code, [torch.nan if v is None else v for v in values])
        return torch.from_numpy(numpy.array(found)).to(dtype)
    is_array = isinstance(values, numpy.ndarray) and values.flags.writeable
    found = torch.from_numpy(values).to(dtype) if is_array else torch.tensor(values, dtype=dtype)
    if found.dim() != 1:
        raise ValueError(f"expected a list of numbers, got one of shape {list(found.shape)}")
    return found


def _all(values: list[int | None]) -> tuple[int, ...] | None:
    return None if any(v is None for v in values) else tuple(values)  # type: ignore[arg-type]


def rollout_number(value: Any) -> int:
    """A rollout number from what a file calls its rollout.

    Raises:
        TypeError, ValueError, OverflowError: not a number, or more digits than an int64 holds.
    """
    found = int(value)
    if abs(found) >= 10**MOST_DIGITS:
        raise ValueError(f"expected a rollout number of at most {MOST_DIGITS} digits, got a longer one")
    return found


def _versions(rows: list[DumpedSample], mask: Tensor, notes: Notes) -> Tensor | None:
    """[T] the weight version of each token; None where no row has any."""
    if not any(row.weight_versions or row.token_versions for row in rows):
        return None
    masks = mask.split([row.response_length for row in rows])
    runs = [run for row, own in zip(rows, masks, strict=True) for run in _version_runs(row, own, notes)]
    numbers, counts = torch.tensor(runs, dtype=torch.int64).view(-1, 2).unbind(1)
    return numbers.repeat_interleave(counts)


def _version_runs(row: DumpedSample, mask: Tensor, notes: Notes) -> list[tuple[int, int]]:
    """The weight versions of a sample's tokens in order, each with the number of tokens in a row."""
    per_token, length = row.token_versions, row.response_length
    if len(per_token) == length and length:
        if per_token.count(per_token[0]) == length:
            return [(_number(per_token[0]), length)]
        return [(_number(version), sum(1 for _ in run)) for version, run in groupby(per_token)]
    numbers = [_number(version) for version in row.weight_versions]
    if len(set(numbers)) <= 1:
        return [(numbers[0] if numbers else UNKNOWN, length)]
    turns = Segments.whole([length], mask).turn_ids
    if length and int(turns[-1]) == len(numbers):  # one engine call per turn
        return [(numbers[max(turn - 1, 0)], sum(1 for _ in run)) for turn, run in groupby(turns.tolist())]
    notes.add("with mixed weight versions and no word of where, counted as the oldest", row)
    return [(min(numbers), length)]


def _number(version: Any) -> int:
    found = number_of(version)
    return UNKNOWN if found is None else found


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
        prompt_length=prompt_length,
        reward=number(sample.get("rewards") if reward is None else reward),
        step=step,
    )


def checksums(samples: Sequence[Any]) -> list[int | None]:
    """A number for the tokens of each sample that differs (but for chance) where tokens or their order
    differ; None for no tokens."""
    try:
        lengths = torch.tensor([len(tokens) for tokens in samples], dtype=torch.int64)
        if all(isinstance(tokens, list) for tokens in samples):
            found = torch.from_numpy(numpy.array(array("q", chain.from_iterable(samples))))
        else:
            found = torch.cat([as_tensor(tokens, torch.int64) for tokens in samples])
        if len(found) != int(lengths.sum()):
            raise ValueError("expected flat lists")
    except (*NO_NUMBERS, AttributeError):
        return [None] if len(samples) == 1 else [one for tokens in samples for one in checksums([tokens])]
    ends = lengths.cumsum(0)
    places = torch.arange(1, len(found) + 1) - (ends - lengths).repeat_interleave(lengths)
    sums = torch.cat([torch.zeros(1, dtype=torch.int64), (found * places).cumsum(0)])  # modulo 2^64
    return (sums[ends] - sums[ends - lengths]).tolist()


def kept_sizes(sample: Mapping[str, Any], length: int, tokens: Any) -> Tensor | None:
    """``DumpedRollout.kept`` of one sample, from slime's replay keys: the kept ids of response token i are
    ids[offsets[i]:offsets[i + 1]] (slime/utils/types.py at 624b824)."""
    ids, offsets = (sample.get(f"rollout_top_p_token_{name}") for name in ("ids", "offsets"))
    if ids is None or offsets is None:
        return None
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
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def text(value: Any) -> str:
    """Text from a string or a list of chat messages; half a surrogate pair, which no file can hold, becomes a
    question mark."""
    if isinstance(value, (list, tuple)):
        parts = (part.get("content", "") if isinstance(part, dict) else part for part in value)
        value = "\n".join(part for part in parts if isinstance(part, str))
    if not isinstance(value, str):
        return ""
    return value if value.isascii() else value.encode("utf-8", "replace").decode()
