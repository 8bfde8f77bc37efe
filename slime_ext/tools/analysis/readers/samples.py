"""Turns a sample of any file into a ``DumpedSample``, and samples into one ``DumpedRollout``.

A rollout may hold thousands of short samples. So only fields are handled sample by sample, and all
computation is over packed tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, make_dataclass
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from types import NoneType
from typing import Any

import numpy
import torch
from torch import Tensor

from slime_ext.hosts.contract import MOST_DIGITS, number_of, versions_of
from slime_ext.ops.segments import Segments
from slime_ext.tools.analysis.document import Skipped
from slime_ext.tools.analysis.fields import UNKNOWN, Field, Record
from slime_ext.tools.analysis.records import ROWS, DumpedRollout
from slime_ext.tools.analysis.values import NO_NUMBERS, NUMPY, as_array, first, whole_number

MOST_CANDIDATES = 1 << 28  # values in the heads of a rollout; both sides then take 2 GiB
OF_SAMPLES = tuple(row for row in ROWS if row.one)  # rows that a sample has by itself
PER_TOKEN = tuple(row for row in OF_SAMPLES if row.per == "token")
LENGTHS = tuple(row.names for row in PER_TOKEN if row.is_needed)  # the lists that tell a response's length


@dataclass
class _Raw:
    """What readers need of a sample besides the rows of ``DumpedRollout``."""

    position: int
    response_length: int
    prompt_length: int = 0
    sampler_head: Any = None  # log-probs [R, K] of the sampler's most likely tokens
    trainer_head: Any = None  # the trainer's of the same tokens
    sampler_support: Any = None  # log-probs [N] of all tokens that top-p kept, position after position
    trainer_support: Any = None  # the trainer's of the same tokens
    support_offsets: Any = None  # [R + 1]
    # Log-probs [R, K] of sampler and trainer, of heads or of supports.
    heads: tuple[Tensor, Tensor] | None = None
    is_exact: bool = False  # true: ``heads`` are supports
    ids: Any = None  # tokens of prompt and response
    routed: Any = None  # experts of the side that wrote the file, [tokens - 1, layers, active]
    index: int | None = None  # of the sample in the run
    weight_versions: Sequence[str] = ()
    token_versions: Sequence[str] = ()


def _absent(row: Field) -> Any:
    return None if row.per == "token" else row.missing


# One sample of a file: lists or tensors over the response [R], and single values, under the name ``one`` of
# each row. A field that the file lacks is None, or the row's ``missing``.
DumpedSample = make_dataclass(
    "DumpedSample",
    [(row.one, Any, _absent(row)) for row in OF_SAMPLES if row.one not in _Raw.__dataclass_fields__],
    bases=(_Raw,),
)


# Attributes of ``_Raw`` -> keys in a file, and what turns the value of a key into the attribute.
RAW: dict[str, tuple[tuple[str, ...], Any]] = {
    "ids": (("tokens",), None),
    "sampler_head": (("rollout_topk_log_probs",), None),
    "trainer_head": (("topk_log_probs",), None),
    "sampler_support": (("rollout_top_p_log_probs",), None),
    "trainer_support": (("top_p_log_probs",), None),
    "support_offsets": (("rollout_top_p_token_offsets",), None),
    "routed": (("rollout_routed_experts", "routed_experts"), None),
    "index": (("index",), whole_number),
    "weight_versions": (("weight_versions",), versions_of),
    "token_versions": (("token_weight_versions",), versions_of),
}


@dataclass(frozen=True)
class _Plan:
    """What to read from samples with the same keys.

    Args:
        plain: attribute, key, and what turns the value into the attribute, or None.
        several: the same with several keys, of which the first that is not null counts.
        computed: attribute, and what returns it from the whole sample.
        lists: the keys of lists that tell the response's length.
    """

    plain: list[tuple[str, str, Any]]
    several: list[tuple[str, tuple[str, ...], Any]]
    computed: list[tuple[str, Any]]
    lists: list[str]


@lru_cache(64)
def _plan(keys: tuple[Any, ...], dump: str | None) -> _Plan:
    rows = [row for row in OF_SAMPLES if dump is None or dump in row.dumps]
    wanted = [(row.one, row.names, row.parse) for row in rows if not row.read]
    wanted += [(attribute, *how) for attribute, how in RAW.items()]
    there = [(one, tuple(name for name in names if name in keys), parse) for one, names, parse in wanted]
    return _Plan(
        [(one, *names, parse) for one, names, parse in there if len(names) == 1],
        [each for each in there if len(each[1]) > 1],
        [(row.one, row.read) for row in rows if row.read and not set(row.names).isdisjoint(keys)],
        [name for names in LENGTHS for name in names if name in keys],
    )


def sample_of(keys: Mapping[str, Any], position: int, dump: str | None = None) -> DumpedSample:
    """Returns the sample of a line of JSONL, or of a sample in slime's dumps.

    Args:
        dump: the dump that holds it, whose fields alone are read; None for JSONL, which has all fields.
    """
    plan, length = _plan(tuple(keys), dump), first(keys, "response_lengths", "response_length")
    ids = keys.get("tokens")
    if length is None:
        length = len(first(keys, *plan.lists, default=()))
    length = int(length)
    count = length if ids is None else len(ids)
    total = max(int(keys.get("total_lengths") or count), length)
    prompt_length = keys.get("prompt_length")
    prompt_length = total - length if prompt_length is None else int(prompt_length)
    if abs(prompt_length) >= 10**MOST_DIGITS:
        raise ValueError(f"expected a prompt_length of at most {MOST_DIGITS} digits, got a longer one")
    values = {one: parse(keys[key]) if parse else keys[key] for one, key, parse in plan.plain}
    for one, names, parse in plan.several:
        value = first(keys, *names)
        values[one] = value if parse is None else parse(value)
    if plan.computed:
        record = Record(keys, length, ids)
        for one, read in plan.computed:
            values[one] = read(record)
    return DumpedSample(position, length, prompt_length, **values)


@dataclass
class Notes:
    """Remarks about samples. Remarks of one kind become one line with their number and the first sample.

    Args:
        kinds: kind -> the samples.
        lacking: reason -> position of a sample -> fields that it lacks.
    """

    kinds: dict[str, list[str]] = field(default_factory=dict)
    lacking: dict[str, dict[int, set[str]]] = field(default_factory=dict)

    def add(self, kind: str, row: DumpedSample, more: str = "") -> None:
        self.kinds.setdefault(kind, []).append(f"sample {row.position}{more}")

    def lack(self, name: str, position: int, why: str) -> None:
        """Adds that a sample lacks a field. One reason becomes one line, whatever the fields are."""
        self.lacking.setdefault(why, {}).setdefault(position, set()).add(name)

    def lines(self) -> tuple[str, ...]:
        lacking = {
            f"without {', '.join(sorted(set().union(*names.values())))}: {why}": [
                f"sample {i}" for i in names
            ]
            for why, names in self.lacking.items()
        }
        return tuple(
            f"{len(v)} sample{'s' * (len(v) > 1)} {kind} (first: {v[0]})"
            for kind, v in (self.kinds | lacking).items()
        )


def assemble(
    rollout_id: int, source: str, rows: Sequence[DumpedSample], notes: Notes, **of_all: Any
) -> DumpedRollout | Skipped:
    """Returns the rollout of some samples, without those whose lists do not fit.

    Args:
        notes: remarks of the caller, to which more are added.
        of_all: fields of ``DumpedRollout`` that concern the whole rollout.
    """
    if reason := _missing(rows):
        return Skipped(source, reason)
    packed = _packed(rows)
    sound = rows if packed is not None else [row for row in rows if _fits(row, notes)]
    if not sound:
        return Skipped(source, "holds no usable sample: " + notes.lines()[0])
    values = {row.name: _joined(sound, row, packed or {}) for row in OF_SAMPLES}
    versions = _versions(sound, values["mask"], notes)
    return DumpedRollout(
        rollout_id=rollout_id,
        source=source,
        **values,
        **_heads(sound),
        versions=versions,
        newest=_newest(versions),
        left_out=len(rows) - len(sound),
        notes=notes.lines(),
        **of_all,
    )


def _missing(rows: Sequence[DumpedSample]) -> str:
    if not rows:
        return "holds no sample"
    if all(row.proximal is None for row in rows):
        return (
            "has no log-probs of the trainer (log_probs): name the train dump of the same rollout as well; "
            "slime v0.3.0 and v0.3.1 write them only with --get-mismatch-metrics"
        )
    if all(row.behavior is None for row in rows):
        return "has no log-probs of the sampler (rollout_log_probs): slime records them with --use-tis"
    return ""


def _packed(rows: Sequence[DumpedSample]) -> dict[str, numpy.ndarray] | None:
    """Returns each field that all samples hold as lists, packed; None if a value of a sample does not fit.

    Turns the values of all other fields per token into arrays.
    """
    if any(row.proximal is None or row.behavior is None for row in rows):
        return None
    lengths, packed = [row.response_length for row in rows], dict[str, numpy.ndarray]()
    for each, columns in _held(rows):
        if set(map(type, columns)) == {list} and list(map(len, columns)) == lengths:
            with suppress(TypeError, OverflowError):  # one of many values is no number
                code = "q" if each.dtype == torch.int64 else "f"
                packed[each.name] = numpy.array(array(code, chain.from_iterable(columns)))
                continue
        try:
            arrays = [None if values is None else as_array(values, each.dtype) for values in columns]
        except NO_NUMBERS:
            return None
        for row, values in zip(rows, arrays, strict=True):
            if values is not None:
                if len(values) != row.response_length:
                    return None
                setattr(row, each.one, values)
    return packed


def _held(rows: Sequence[DumpedSample]) -> Iterator[tuple[Field, list[Any]]]:
    """Yields the fields per token that a sample has, with the value of each sample."""
    for each in PER_TOKEN:
        columns = list(map(attrgetter(each.one), rows))  # __dict__ would make a dictionary for each row
        if set(map(type, columns)) != {NoneType}:
            yield each, columns


def _fits(row: DumpedSample, notes: Notes) -> bool:
    """Turns the lists of a sample into arrays. Returns whether all have the length of the response."""
    if row.proximal is None:
        notes.add("skipped because the trainer's log-probs are missing", row)
        return False
    for each in PER_TOKEN:
        if (values := getattr(row, each.one)) is None:
            continue
        try:
            array = as_array(values, each.dtype)
        except NO_NUMBERS:
            notes.add("skipped because a list holds something other than numbers", row, f", {each.name}")
            return False
        if len(array) != row.response_length:
            lengths = f", {each.name} {len(array)}, response {row.response_length}"
            notes.add("skipped because a list has another length than the response", row, lengths)
            return False
        setattr(row, each.one, array)
    if row.behavior is None:
        notes.add("without log-probs of the sampler", row)
    return True


def _joined(samples: Sequence[DumpedSample], row: Field, packed: Mapping[str, numpy.ndarray]) -> Any:
    """Returns a field of all samples; None if no sample has an optional field per token.

    Removes values per token from the samples, so that they are in memory only once.

    Args:
        packed: from ``_packed``.
    """
    values = list(map(attrgetter(row.one), samples))
    if row.per == "sample":
        return row.join(values)
    if set(map(type, values)) == {NoneType}:
        size = sum(sample.response_length for sample in samples)
        return row.join(torch.full((size,), row.missing, dtype=row.dtype)) if row.is_needed else None
    for sample in samples:
        setattr(sample, row.one, None)
    if row.name in packed:
        return row.join(torch.from_numpy(packed[row.name]))
    for i, sample in enumerate(samples):
        if values[i] is None:
            values[i] = numpy.full(sample.response_length, row.missing, dtype=NUMPY[row.dtype])
    return row.join(torch.from_numpy(numpy.concatenate(values)))


def _heads(rows: Sequence[DumpedSample]) -> dict[str, Any]:
    """Returns the heads of a rollout, padded to one width; {} unless all samples have the same kind."""
    heads = [row.heads for row in rows if row.heads is not None]
    if len(heads) < len(rows) or len({row.is_exact for row in rows}) != 1:
        return {}
    width = max(sampler.shape[1] for sampler, _ in heads)
    if not rows[0].is_exact and any(sampler.shape[1] != width for sampler, _ in heads):
        return {}
    if width * sum(map(len, (sampler for sampler, _ in heads))) > MOST_CANDIDATES:
        return {}

    def padded(sides: Iterable[Tensor]) -> Tensor:
        pads = [torch.nn.functional.pad(x, (0, width - x.shape[1]), value=torch.nan) for x in sides]
        return torch.cat(pads)

    sampler, trainer = (padded(sides) for sides in zip(*heads, strict=True))
    return {"sampler_head": sampler, "trainer_head": trainer, "is_exact": rows[0].is_exact}


def _newest(versions: Tensor | None) -> int | None:
    newest = UNKNOWN if versions is None or not len(versions) else int(versions.max())
    return None if newest == UNKNOWN else newest


def rollout_number(value: Any) -> int:
    """Returns the rollout number from the value in a file.

    Raises:
        TypeError, ValueError, OverflowError: not a number, or more digits than an int64 holds.
    """
    rollout_id = int(value)
    if abs(rollout_id) >= 10**MOST_DIGITS:
        raise ValueError(f"expected a rollout number of at most {MOST_DIGITS} digits, got a longer one")
    return rollout_id


def _versions(rows: list[DumpedSample], mask: Tensor, notes: Notes) -> Tensor | None:
    """Returns the weight version of each token, [T]; None if no row has any."""
    if not any(row.weight_versions or row.token_versions for row in rows):
        return None
    lengths = [row.response_length for row in rows]
    if all(len(row.weight_versions) == 1 and not row.token_versions for row in rows):
        alike = [_number(row.weight_versions[0]) for row in rows]
        return torch.from_numpy(numpy.repeat(numpy.array(alike, dtype=numpy.int64), lengths))
    masks = mask.split(lengths)
    return torch.cat([_versions_of(row, row_mask, notes) for row, row_mask in zip(rows, masks, strict=True)])


def _versions_of(row: DumpedSample, mask: Tensor, notes: Notes) -> Tensor:
    """Returns the weight version of each token, [R]."""
    by_token = len(row.token_versions) == row.response_length > 0
    numbers = [_number(version) for version in (row.token_versions if by_token else row.weight_versions)]
    if by_token:
        return torch.tensor(numbers)
    if len(set(numbers)) > 1:
        turns = Segments.whole([len(mask)], mask).turn_ids
        if len(mask) and int(turns[-1]) == len(numbers):  # one engine call per turn
            return torch.tensor(numbers)[(turns.long() - 1).clamp(min=0)]
        notes.add("with several weight versions at unknown tokens, which count as the oldest", row)
    return torch.full((len(mask),), min(numbers, default=UNKNOWN))


def _number(version: Any) -> int:
    version_number = number_of(version)
    return UNKNOWN if version_number is None else version_number
