"""Turns a sample of any file into a ``DumpedSample``, and samples into one ``DumpedRollout``.

A rollout may hold thousands of short samples. So only fields are handled sample by sample, and all
computation is over packed tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, make_dataclass
from itertools import chain
from operator import attrgetter
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

LIMIT = 10**MOST_DIGITS  # of a rollout's number and of a prompt's length; every line has both
MOST_CANDIDATES = 1 << 28  # values in the heads of a rollout; both sides then take 2 GiB
OF_SAMPLES = tuple(row for row in ROWS if row.one)  # rows that a sample has by itself
PER_TOKEN = tuple(row for row in OF_SAMPLES if row.per == "token")
LENGTHS = tuple(row.names for row in PER_TOKEN if row.is_needed)  # the lists that tell a response's length
# Keys of the log-probs of sampler and trainer.
BOTH_SIDES = tuple(name for row in PER_TOKEN if row.one in ("behavior", "proximal") for name in row.names)


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


SAMPLE = """One sample of a file: lists or tensors over the response [R], and single values.

Each is under the name ``one`` of its row. A field that the file lacks is None, or the row's ``missing``.
"""
DumpedSample = make_dataclass(
    "DumpedSample",
    [(row.one, Any, _absent(row)) for row in OF_SAMPLES if row.one not in _Raw.__dataclass_fields__],
    bases=(_Raw,),
    namespace={"__doc__": SAMPLE},
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


# Values of samples: attributes of ``DumpedSample`` -> a list over the samples. An attribute may be missing.
Columns = dict[str, list[Any]]


def columns_of(
    samples: Sequence[Mapping[str, Any]], positions: Iterable[int], dump: str | None = None
) -> Columns:
    """Returns the values of samples: lines of JSONL, or samples in slime's dumps.

    Args:
        dump: the dump that holds them; only its fields are read. None: JSONL, which has all fields.
    """
    keys, count = frozenset[Any]().union(*samples), len(samples)

    def values_of(*names: str) -> list[Any] | None:
        """Returns the first value of each sample under one of the keys; None if no sample has any of them."""
        there = [name for name in names if name in keys]
        if not there:
            return None
        values = [sample.get(there[0]) for sample in samples]
        if len(there) > 1 and any(value is None for value in values):
            return [first(sample, *there) for sample in samples]
        return values

    rows = [row for row in OF_SAMPLES if dump is None or dump in row.dumps]
    plain = {row.one: (row.names, row.parse) for row in rows if not row.read}
    none = [None] * count
    sizes = map(
        _sizes,
        values_of("response_lengths", "response_length") or none,
        values_of(*chain.from_iterable(LENGTHS)) or none,
        values_of("tokens") or none,
        values_of("total_lengths") or none,
        values_of("prompt_length") or none,
    )
    response_lengths, prompt_lengths = zip(*sizes, strict=True) if count else ((), ())
    columns: Columns = {"position": list(positions)}
    columns |= {"response_length": list(response_lengths), "prompt_length": list(prompt_lengths)}
    for one, (names, parse) in (plain | RAW).items():
        values = values_of(*names)
        if values is not None:
            columns[one] = values if parse is None else list(map(parse, values))
    computed = [row for row in rows if row.read and not keys.isdisjoint(row.names)]
    if computed:
        records = list(map(Record, samples, response_lengths, columns.get("ids", none)))
        columns |= {row.one: list(map(row.read, records)) for row in computed}
    return columns


def _sizes(length: Any, values: Any, ids: Any, total: Any, prompt_length: Any) -> tuple[int, int]:
    """Returns the lengths of response and prompt.

    Args:
        length: the response's, or None.
        values: a list over the response, or None.
        ids: tokens of prompt and response, or None.
        total: their number, or None.
        prompt_length: or None.
    """
    if length is None:
        length = 0 if values is None else len(values)
    length = int(length)
    count = length if ids is None else len(ids)
    total = max(int(total or count), length)
    prompt_length = total - length if prompt_length is None else int(prompt_length)
    if abs(prompt_length) >= LIMIT:
        raise ValueError(f"expected a prompt_length of at most {MOST_DIGITS} digits, got a longer one")
    return length, prompt_length


def samples_of(columns: Columns) -> list[DumpedSample]:
    """Returns the samples whose values are these."""
    return [
        DumpedSample(**dict(zip(columns, values, strict=True)))
        for values in zip(*columns.values(), strict=True)
    ]


def taken_from(rows: Sequence[DumpedSample]) -> Columns:
    """Takes the values of samples from them, so that they are in memory only once."""
    columns = {name: list(map(attrgetter(name), rows)) for name in DumpedSample.__dataclass_fields__}
    for row in rows:
        vars(row).clear()
    return columns


@dataclass
class Notes:
    """Remarks about samples. Remarks of one kind become one line with their number and the first sample.

    Args:
        kinds: kind -> the samples.
        lacking: reason -> position of a sample -> fields that it lacks.
    """

    kinds: dict[str, list[str]] = field(default_factory=dict)
    lacking: dict[str, dict[int, set[str]]] = field(default_factory=dict)

    def add(self, kind: str, position: int, more: str = "") -> None:
        self.kinds.setdefault(kind, []).append(f"sample {position}{more}")

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
    rollout_id: int, source: str, columns: Columns, notes: Notes, **of_all: Any
) -> DumpedRollout | Skipped:
    """Returns the rollout of some samples, without those whose lists do not fit.

    Args:
        columns: the values of the samples. Their lists may become arrays, in place.
        notes: remarks of the caller, to which more are added.
        of_all: fields of ``DumpedRollout`` that concern the whole rollout.
    """
    count = len(columns["position"])
    columns = _held(columns)
    if reason := _missing(columns, count):
        return Skipped(source, reason)
    packed = _packed(columns)
    if packed is None:
        sound = [i for i in range(count) if _fits(columns, i, notes)]
        if not sound:
            return Skipped(source, "holds no usable sample: " + notes.lines()[0])
        packed = {}
        columns = _held({one: [values[i] for i in sound] for one, values in columns.items()})
    values = {row.name: _joined(columns, row, packed) for row in OF_SAMPLES}
    versions = _versions(columns, values["mask"], notes)
    return DumpedRollout(
        rollout_id=rollout_id,
        source=source,
        **values,
        **_heads(columns),
        versions=versions,
        newest=_newest(versions),
        left_out=count - len(columns["position"]),
        notes=notes.lines(),
        **of_all,
    )


def _held(columns: Columns) -> Columns:
    """Returns the columns in which a sample has a value."""
    return {one: values for one, values in columns.items() if any(value is not None for value in values)}


def _missing(columns: Columns, count: int) -> str:
    if not count:
        return "holds no sample"
    if "proximal" not in columns:
        return (
            "has no log-probs of the trainer (log_probs): name the train dump of the same rollout as well; "
            "slime v0.3.0 and v0.3.1 write them only with --get-mismatch-metrics"
        )
    if "behavior" not in columns:
        return "has no log-probs of the sampler (rollout_log_probs): slime records them with --use-tis"
    return ""


def _packed(columns: Columns) -> dict[str, numpy.ndarray] | None:
    """Returns each field that all samples hold as lists, packed; None if a value of a sample does not fit.

    Turns the values of all other fields per token into arrays.
    """
    if any(value is None for side in ("proximal", "behavior") for value in columns[side]):
        return None
    lengths, packed = columns["response_length"], dict[str, numpy.ndarray]()
    for row in (row for row in PER_TOKEN if row.one in columns):
        values = columns[row.one]
        kinds = set(map(type, values))
        if row.repeats and kinds <= {int, float}:
            with suppress(*NO_NUMBERS):  # an integer is too large
                packed[row.one] = numpy.repeat(as_array(values, row.dtype), lengths)
                continue
        if kinds == {list} and list(map(len, values)) == lengths:
            with suppress(*NO_NUMBERS):  # one of many values is no number
                packed[row.one] = as_array(list(chain.from_iterable(values)), row.dtype)
                continue
        try:
            arrays = [None if value is None else as_array(value, row.dtype) for value in values]
        except NO_NUMBERS:
            return None
        if any(a is not None and len(a) != n for a, n in zip(arrays, lengths, strict=True)):
            return None
        columns[row.one] = arrays
    return packed


def _fits(columns: Columns, i: int, notes: Notes) -> bool:
    """Turns the lists of a sample into arrays. Returns whether all have the length of the response."""
    position, length = columns["position"][i], columns["response_length"][i]
    if columns["proximal"][i] is None:
        notes.add("skipped because the trainer's log-probs are missing", position)
        return False
    for row in PER_TOKEN:
        values = columns.get(row.one)
        if values is None or values[i] is None:
            continue
        is_one = row.repeats and isinstance(values[i], (int, float))
        try:
            values[i] = as_array([values[i]] * length if is_one else values[i], row.dtype)
        except NO_NUMBERS:
            what = "skipped because a list holds something other than numbers"
            notes.add(what, position, f", {row.name}")
            return False
        if len(values[i]) != length:
            lengths = f", {row.name} {len(values[i])}, response {length}"
            notes.add("skipped because a list has another length than the response", position, lengths)
            return False
    if columns["behavior"][i] is None:
        notes.add("without log-probs of the sampler", position)
    return True


def _joined(columns: Columns, row: Field, packed: dict[str, numpy.ndarray]) -> Any:
    """Returns a field of all samples; None if no sample has an optional field per token.

    Removes values per token, so that they are in memory only once.

    Args:
        packed: from ``_packed``.
    """
    lengths = columns["response_length"]
    if row.per == "sample":
        return row.join(columns.get(row.one, [row.missing] * len(lengths)))
    if row.one not in columns:
        return row.join(torch.full((sum(lengths),), row.missing, dtype=row.dtype)) if row.is_needed else None
    values = columns.pop(row.one)
    if row.one in packed:
        return row.join(torch.from_numpy(packed.pop(row.one)))
    for i, length in enumerate(lengths):
        if values[i] is None:
            values[i] = numpy.full(length, row.missing, dtype=NUMPY[row.dtype])
    return row.join(torch.from_numpy(numpy.concatenate(values)))


def _heads(columns: Columns) -> dict[str, Any]:
    """Returns the heads of a rollout, padded to one width; {} unless all samples have the same kind."""
    heads, kinds = columns.get("heads"), set(columns.get("is_exact", ()))
    if heads is None or any(head is None for head in heads) or len(kinds) != 1:
        return {}
    (is_exact,) = kinds
    width = max(sampler.shape[1] for sampler, _ in heads)
    if not is_exact and any(sampler.shape[1] != width for sampler, _ in heads):
        return {}
    if width * sum(map(len, (sampler for sampler, _ in heads))) > MOST_CANDIDATES:
        return {}

    def padded(sides: Iterable[Tensor]) -> Tensor:
        pads = [torch.nn.functional.pad(x, (0, width - x.shape[1]), value=torch.nan) for x in sides]
        return torch.cat(pads)

    sampler, trainer = (padded(sides) for sides in zip(*heads, strict=True))
    return {"sampler_head": sampler, "trainer_head": trainer, "is_exact": is_exact}


def _newest(versions: Tensor | None) -> int | None:
    newest = UNKNOWN if versions is None or not len(versions) else int(versions.max())
    return None if newest == UNKNOWN else newest


def rollout_number(value: Any) -> int:
    """Returns the rollout number from the value in a file.

    Raises:
        TypeError, ValueError, OverflowError: not a number, or more digits than an int64 holds.
    """
    rollout_id = int(value)
    if abs(rollout_id) >= LIMIT:
        raise ValueError(f"expected a rollout number of at most {MOST_DIGITS} digits, got a longer one")
    return rollout_id


def _versions(columns: Columns, mask: Tensor, notes: Notes) -> Tensor | None:
    """Returns the weight version of each token, [T]; None if no sample has any."""
    lengths, none = columns["response_length"], [()] * len(columns["position"])
    of_samples, of_tokens = (columns.get(one, none) for one in ("weight_versions", "token_versions"))
    if not any(of_samples) and not any(of_tokens):
        return None
    if not any(of_tokens) and set(map(len, of_samples)) == {1}:
        alike = [_number(version) for (version,) in of_samples]
        return torch.from_numpy(numpy.repeat(numpy.array(alike, dtype=numpy.int64), lengths))
    samples = zip(columns["position"], of_samples, of_tokens, mask.split(lengths), strict=True)
    return torch.cat([_versions_of(*sample, notes) for sample in samples])


def _versions_of(
    position: int, of_sample: Sequence[Any], of_tokens: Sequence[Any], mask: Tensor, notes: Notes
) -> Tensor:
    """Returns the weight version of each token, [R]."""
    by_token = len(of_tokens) == len(mask) > 0
    numbers = [_number(version) for version in (of_tokens if by_token else of_sample)]
    if by_token:
        return torch.tensor(numbers)
    if len(set(numbers)) > 1:
        turns = Segments.whole([len(mask)], mask).turn_ids
        if len(mask) and int(turns[-1]) == len(numbers):  # one engine call per turn
            return torch.tensor(numbers)[(turns.long() - 1).clamp(min=0)]
        notes.add("with several weight versions at unknown tokens, which count as the oldest", position)
    return torch.full((len(mask),), min(numbers, default=UNKNOWN))


def _number(version: Any) -> int:
    version_number = number_of(version)
    return UNKNOWN if version_number is None else version_number
