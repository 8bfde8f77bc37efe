"""Defines a field of a dump: one row in ``DumpedRollout``, from which its parts and the readers follow."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, NamedTuple

import numpy
import torch
from torch import Tensor

from slime_ext.errors import cut
from slime_ext.hosts.contract import number_of
from slime_ext.tools.analysis.texts import encodable
from slime_ext.tools.analysis.values import NO_NUMBERS, as_tensor, first, text, whole_number

TRAIN, ROLLOUT = "train", "rollout"  # the two dumps of a rollout
UNKNOWN = -1  # version of unknown weights, or id of an unknown token
ROW = "row"  # key in the metadata of a dataclass field
# Keys of a sample or of its metadata that name the engine that sampled it. slime and vime record no engine,
# and miles only for agents (session_server_id). A custom generate function can record it.
ENGINES = ("engine", "engine_id", "engine_url", "worker_id", "worker_url", "server_url", "session_server_id")
ENGINE_RANK = "dp_rank"  # data-parallel rank inside an engine: SGLang's meta_info["dp_rank"]


class Record(NamedTuple):
    """A sample as a file holds it.

    Args:
        keys: of the sample.
        length: number of response tokens.
        ids: tokens of prompt and response, or None.
    """

    keys: Mapping[str, Any]
    length: int
    ids: Any = None


@dataclass(frozen=True)
class Field:
    """One field of ``DumpedRollout`` with a value per response token or per sample.

    Args:
        name: in ``DumpedRollout``.
        per: what has a value.
        doc: what a value is, with its unit.
        one: its name in ``DumpedSample``, which holds one sample; None: the same name, "": only a whole
            rollout has the field.
        dtype: of a field per token.
        missing: the value of a token, or of a sample, whose file lacks the field.
        names: its keys in a file; the first that is present and not null counts. None: a reader computes it.
        parse: turns the value of a key into the sample's; None: it stays as it is.
        read: returns the value of a sample that has one of the keys, if a key alone does not tell it.
        dumps: the dumps that may hold it; where several do, the first of them counts.
        join: turns the packed tokens [T], or the list of S values, into the rollout's field.
        repeats: whether a sample may hold one number for all of its tokens.
        is_needed: whether every rollout has it, because it has no default.
    """

    name: str
    per: Literal["token", "sample"]
    doc: str
    one: str | None
    dtype: torch.dtype
    missing: Any
    names: tuple[str, ...]
    parse: Callable[[Any], Any] | None
    read: Callable[[Record], Any] | None
    dumps: tuple[str, ...]
    join: Callable[[Any], Any]
    repeats: bool = False
    is_needed: bool = False


def per_token(
    doc: str,
    names: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
    missing: float = torch.nan,
    *,
    read: Callable[[Record], Any] | None = None,
    dumps: tuple[str, ...] = (TRAIN,),
    join: Callable[[Tensor], Tensor] = lambda tokens: tokens,
    one: str | None = None,
    repeats: bool = False,
) -> dict[str, Field]:
    """Returns the metadata of a field with a value per response token; see ``Field``."""
    return {ROW: Field("", "token", doc, one, dtype, missing, tuple(names), None, read, dumps, join, repeats)}


def per_sample(
    doc: str,
    one: str,
    names: Sequence[str] = (),
    parse: Callable[[Any], Any] = whole_number,
    missing: Any = None,
    *,
    read: Callable[[Record], Any] | None = None,
    dumps: tuple[str, ...] = (TRAIN,),
    join: Callable[[list[Any]], Any] = lambda values: None if None in values else tuple(values),
) -> dict[str, Field]:
    """Returns the metadata of a field with a value per sample; see ``Field``."""
    row = Field("", "sample", doc, one, torch.int64, missing, tuple(names), parse, read, dumps, join)
    return {ROW: row}


def rows_of(rollout: type) -> tuple[Field, ...]:
    """Returns the rows of a dataclass, with their names."""
    rows = {f: f.metadata[ROW] for f in dataclasses.fields(rollout) if ROW in f.metadata}
    return tuple(
        dataclasses.replace(
            row,
            name=f.name,
            one=f.name if row.one is None else row.one,
            is_needed=f.default is dataclasses.MISSING,
        )
        for f, row in rows.items()
    )


def response_ids(record: Record) -> Any:
    """Returns the token ids of the response; None if the sample does not hold all of them."""
    count = 0 if record.ids is None else len(record.ids)
    return None if record.ids is None or count < record.length else record.ids[count - record.length :]


def as_floats(values: list[float | None]) -> Tensor | None:
    """Returns the values of all samples in float64, NaN where one is missing; None if all are."""
    if all(value is None for value in values):
        return None
    known = [math.nan if value is None else value for value in values]
    return torch.from_numpy(numpy.array(known, dtype=numpy.float64))


def cached_tokens(caching: Any) -> int | None:
    """Returns the number of cached prompt tokens in slime's ``prefix_cache_info``."""
    return whole_number(caching.get("cached_tokens")) if isinstance(caching, Mapping) else None


def version_gap(versions: Any) -> int | None:
    """Returns how many weight versions lie between the oldest and the newest of a sample.

    >>> version_gap(["3", "5", "7"]), version_gap(["3"]), version_gap([]), version_gap(["default"])
    (4, 0, None, None)
    """
    if not isinstance(versions, (list, tuple)):
        return None
    numbers = [number_of(version) for version in versions]
    return max(numbers) - min(numbers) if numbers and None not in numbers else None


def status_of(record: Record) -> str:
    """Returns how a sample ended, in the host's words; empty if unknown."""
    status = cut(text(record.keys.get("status")))
    return status or ("truncated" if record.keys.get("truncated") == 1 else "")


def kept_sizes(record: Record) -> Tensor | None:
    """Returns ``DumpedRollout.kept`` of one sample, from slime's replay keys.

    The kept ids of response token i are ids[offsets[i]:offsets[i + 1]] (slime/utils/types.py at 624b824).
    """
    ids, offsets = (record.keys.get(f"rollout_top_p_token_{name}") for name in ("ids", "offsets"))
    if ids is None or offsets is None:
        return None
    try:
        ids, offsets, drawn = (as_tensor(values, torch.int64) for values in (ids, offsets, record.ids))
    except NO_NUMBERS:
        return None
    sizes, drawn = offsets.diff(), drawn[len(drawn) - record.length :]
    if (
        not len(drawn) == len(sizes) == record.length
        or int(sizes.sum()) != len(ids)
        or bool((sizes < 0).any())
    ):
        return None
    at = torch.repeat_interleave(sizes)
    is_in = torch.zeros(record.length).index_add(0, at, (ids == drawn[at]).float()) > 0
    return torch.where(sizes == 0, torch.nan, torch.where(is_in, sizes, -sizes).float())


def engine_of(record: Record) -> str:
    """Returns the name of the engine that sampled a sample, with the rank inside it; empty if unknown.

    >>> keys = {"metadata": {"engine_url": "http://node3:15000", "dp_rank": 1}}
    >>> engine_of(Record(keys, 0)), engine_of(Record({}, 0))
    ('http://node3:15000 dp 1', '')
    """
    metadata = record.keys.get("metadata")
    places = (record.keys, metadata) if isinstance(metadata, Mapping) and metadata else (record.keys,)
    engine, rank = _label(places, ENGINES), _label(places, (ENGINE_RANK,))
    return f"{engine} dp {rank}".strip() if rank else engine


def _label(places: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    for place in places:
        if isinstance(value := first(place, *names), (str, Integral)):
            return encodable(cut(value))
    return ""
