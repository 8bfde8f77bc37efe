"""Samples of any format -> one ``DumpedRollout``. Work per sample is a look at its fields, work per token
none: what is computed is computed of all samples at once, since a rollout may have thousands that are
short."""

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
    token_sum: int | None = None  # of all tokens, see ``checksums``
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
        self.kinds.setdefault(kind, []).append(f"sample {row.position}{more}")

    def lines(self) -> tuple[str, ...]:
        return tuple(f"{len(v)} samples {kind} (first: {v[0]})" for kind, v in self.kinds.items())


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
        left_out=len(rows) - len(sound),
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
        notes.add("skipped: no trainer log-probs", row)
        return False
    for name, (dtype, _) in FIELDS.items():
        values = getattr(row, name)
        is_sound = isinstance(values, Tensor) and values.shape == (row.response_length,)
        if values is None or is_sound:
            continue
        try:
            found = as_tensor(values, dtype)
        except NO_NUMBERS:
            notes.add("skipped: a list holds something other than numbers", row, f", {name}")
            return False
        if len(found) != row.response_length:
            notes.add(
                "skipped: list length differs from the response",
                row,
                f", {name} {len(found)}, response {row.response_length}",
            )
            return False
        setattr(row, name, found)
    if row.behavior is None:
        notes.add("have no sampler log-probs", row)
    return True


def _packed(rows: Sequence[DumpedSample], name: str) -> Tensor | None:
    """A field of all rows in one flat tensor, taken from them, so that it is not in memory twice; None where
    no row has it and a rollout need not."""
    if name not in ALWAYS and all(getattr(row, name) is None for row in rows):
        return None
    dtype, missing = FIELDS[name]
    parts = [_part(getattr(row, name), row.response_length, dtype, missing) for row in rows]
    for row in rows:
        setattr(row, name, None)
    return torch.cat(parts)


def _part(values: Tensor | None, length: int, dtype: torch.dtype, missing: float) -> Tensor:
    """A field of one row, [R] of a dtype."""
    if values is None:
        return torch.full((length,), missing, dtype=dtype)
    return values if values.dtype == dtype else values.to(dtype)


def as_tensor(values: Any, dtype: torch.dtype) -> Tensor:
    """A CPU tensor [R] from a list, in which None means NaN, or from a tensor.

    Raises:
        TypeError, ValueError, RuntimeError, OverflowError: something else than a list of numbers.
    """
    if isinstance(values, Tensor):
        return values.detach().reshape(-1).to("cpu", dtype)
    if isinstance(values, (list, tuple)):
        return _of_list(values, dtype)
    is_array = isinstance(values, numpy.ndarray) and values.flags.writeable
    found = torch.from_numpy(values).to(dtype) if is_array else torch.tensor(values, dtype=dtype)
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
    masks = mask.split([row.response_length for row in rows])
    runs = [run for row, own in zip(rows, masks, strict=True) for run in _version_runs(row, own, notes)]
    numbers, counts = torch.tensor(runs, dtype=torch.int64).view(-1, 2).unbind(1)
    return numbers.repeat_interleave(counts)


def _version_runs(row: DumpedSample, mask: Tensor, notes: Notes) -> list[tuple[int, int]]:
    """The weight versions of a sample's tokens, each with the number of neighbours that have it."""
    per_token, length = row.token_versions, row.response_length
    if len(per_token) == length and length:
        if per_token.count(per_token[0]) == length:
            return [(_number(per_token[0]), length)]
        return [(_number(version), sum(1 for _ in run)) for version, run in groupby(per_token)]
    numbers = [_number(version) for version in row.weight_versions]
    if len(set(numbers)) <= 1:
        return [(numbers[0] if numbers else UNKNOWN, length)]
    turns = Segments.whole([length], mask).turn_ids
    if length and int(turns[-1]) == len(numbers):  # one call of the engine for each turn
        return [(numbers[max(turn - 1, 0)], sum(1 for _ in run)) for turn, run in groupby(turns.tolist())]
    notes.add("mix weight versions without saying where; counted as the oldest", row)
    return [(min(numbers), length)]


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
        prompt_length=prompt_length,
        reward=number(sample.get("rewards") if reward is None else reward),
        step=step,
    )


def checksums(samples: Sequence[Any]) -> list[int | None]:
    """For the tokens of each sample a number that differs where tokens or their order do, but for chance;
    None for no tokens."""
    try:
        lengths = torch.tensor([len(tokens) for tokens in samples], dtype=torch.int64)
        found = _flat(samples)
        if len(found) != int(lengths.sum()):
            raise ValueError("expected flat lists")
    except (*NO_NUMBERS, AttributeError):
        return [None] if len(samples) == 1 else [one for tokens in samples for one in checksums([tokens])]
    ends = lengths.cumsum(0)
    places = torch.arange(1, len(found) + 1) - (ends - lengths).repeat_interleave(lengths)
    sums = torch.cat([torch.zeros(1, dtype=torch.int64), (found * places).cumsum(0)])  # modulo 2^64
    return (sums[ends] - sums[ends - lengths]).tolist()


def _flat(samples: Sequence[Any]) -> Tensor:
    """The tokens of all samples, int64.

    Raises:
        TypeError, ValueError, RuntimeError, OverflowError, AttributeError: something else than lists of
        tokens.
    """
    if all(isinstance(tokens, list) for tokens in samples):
        return torch.from_numpy(numpy.array(array("q", chain.from_iterable(samples))))
    return torch.cat([as_tensor(tokens, torch.int64) for tokens in samples])


def kept_sizes(sample: Mapping[str, Any], length: int, tokens: Any) -> Tensor | None:
    """``DumpedRollout.kept`` of one sample, from slime's replay keys: of response token i the kept ids are
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
