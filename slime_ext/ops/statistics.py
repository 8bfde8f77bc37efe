"""The statistics that steps ask for, computed together: one pass over the tokens, one all-reduce, whatever
the steps are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from slime_ext.ops.grid import Extreme, Grid, rounded
from slime_ext.ops.segments import Segments, identity, is_traced

Unit = Literal["token", "turn", "sequence"]
Values = TypeVar("Values", Tensor, np.ndarray)


class Over(NamedTuple):
    """By how much ``name`` exceeds ``limit``: its sum is 0 where no token does, and that is all it tells."""

    name: str
    limit: float


class Need(NamedTuple):
    """One statistic: ``aggregate`` of the per-token quantity ``name`` over the response tokens of each
    ``unit``.

    ``slots`` is the table [S, slots] of minima per part of a sequence that ``prefix_min`` reads; empty
    where one rank holds every token.
    """

    aggregate: Literal["sum", "max", "slots"]
    unit: Literal["turn", "sequence"]
    name: str | Over


def tabulate(
    needs: Iterable[Need], value_of: Callable[[str | Over], Tensor], segments: Segments
) -> dict[Need, Tensor]:
    """Every need as one tensor over its units, after at most one call of ``segments.all_sum``.

    Args:
        needs: what to compute; duplicates cost nothing.
        value_of: the per-token quantity [T] of a name, 0 at masked tokens.

    Returns:
        need -> [S] or [U] float64 (``slots``: see ``Need``); maxima of a unit without response tokens are
        -inf.
    """
    wanted = list(dict.fromkeys(needs))
    totals = [n for n in wanted if n.aggregate == "sum" and n.unit == "sequence"]
    others = [n for n in wanted if n not in totals]
    shares = [_share(n, value_of(n.name), segments) for n in others]
    if totals:
        names = [n.name for n in totals]
        shares += (_traced_sums if is_traced(segments.mask) else _sums)(names, value_of, segments)
    shares = _all_sum(shares, len(others), segments)
    table = {n: _finish(n, share) for n, share in zip(others, shares, strict=False)}
    table |= dict(zip(totals, shares[len(others) :], strict=True))
    return table


def _sums(
    names: Sequence[str | Over], value_of: Callable[[str | Over], Tensor], segments: Segments
) -> list[Tensor]:
    """[S] float64 each, this rank's share of the sums of these names over every sequence."""
    rows, places = _planned(tuple(names))
    values = [value_of(row) for row in rows]
    limits = _limits(names, places, values)
    return _named(names, places, segments.grid.sums(values, limits).unbind(), values)


def sums_of_arrays(
    names: Sequence[str | Over], value_of: Callable[[str], np.ndarray | None], grid: Grid
) -> list[np.ndarray]:
    """[S] each, this rank's share of the sums of these names over every sequence, where numpy sees the
    tokens.

    Args:
        value_of: the per-token quantity [T] of a name, 0 at masked tokens; None: 1 at every token.
    """
    rows, places = _planned(tuple(names))
    values = [value_of(row) for row in rows]
    return _named(names, places, grid.sums_of_arrays(values, _limits(names, places, values)), values)


def _named(
    names: Sequence[str | Over], places: list[list[int]], found: Sequence[Values], values: Sequence
) -> list[Values]:
    """[S] the sum of each name, of tensors as of arrays.

    Args:
        found: the sums of the rows, then what was asked of extremes.
        values: the rows; None: 1 at every token.
    """
    beyond, sums = iter(found[len(values) :]), []
    for name, (row, *others) in zip(names, places, strict=True):
        total = next(beyond) if isinstance(name, Over) else found[row]
        if name == "sound" and values[others[0]] is not None:  # infinite where some token is not finite
            total = total / (total == found[others[0]])
        sums.append(total)
    return sums


@functools.lru_cache
def _planned(names: tuple[str | Over, ...]) -> tuple[tuple[str, ...], list[list[int]]]:
    """Every row of tokens that these names take, each once; and which of them each name takes."""
    rows: dict[str, int] = {}
    places = [[rows.setdefault(row, len(rows)) for row in _rows_of(name)] for name in names]
    return tuple(rows), places


def _limits(names: Sequence[str | Over], places: list[list[int]], values: Sequence) -> list[Extreme]:
    """What tokens are asked whether they lie beyond, in the order of the names."""
    return [
        Extreme(row, name.name == "k1", rounded(name.limit, values[row]))
        for name, (row, *_) in zip(names, places, strict=True)
        if isinstance(name, Over)
    ]


def _rows_of(name: str | Over) -> tuple[str, ...]:
    """The rows that a name's sum takes; k1 beyond a limit is a log-ratio below the negative limit."""
    if isinstance(name, Over):
        return ("ratio",) if name.name == "k1" else (name.name,)
    return ("count", "finite") if name == "sound" else (name,)


def _traced_sums(
    names: Sequence[str | Over], value_of: Callable[[str | Over], Tensor], segments: Segments
) -> list[Tensor]:
    return list(segments.grid.totals([_partial(name, value_of, segments) for name in names]))


def _partial(name: str | Over, value_of: Callable[[str | Over], Tensor], segments: Segments) -> Tensor:
    if isinstance(name, Over):  # no token of a block exceeds the limit where its largest does not
        return (segments.grid.partial(value_of(name.name), "amax") - name.limit).clamp_min_(0)
    return segments.grid.partial(value_of(name))


def _share(need: Need, values: Tensor, segments: Segments) -> Tensor:
    if need.aggregate == "sum":
        return segments.turn_sum_shares(values)
    if need.unit == "turn":
        return segments.turn_max_shares(values)
    if need.aggregate == "slots" and segments.is_whole:
        return values.new_empty(0)  # before a sequence's only part there is none
    signed = values if need.aggregate == "max" else -values
    return segments.max_shares(torch.where(segments.mask, signed, -torch.inf))


def _finish(need: Need, share: Tensor) -> Tensor:
    if need.aggregate in ("sum", "slots"):
        return share
    if need.unit == "turn":
        share = torch.where(share[..., 1] > 0, share[..., 0], -torch.inf)
    return share.amax(1)


def _all_sum(shares: list[Tensor], others: int, segments: Segments) -> list[Tensor]:
    """Over all ranks, in one call: the first ``others`` as they are, then all sums of a sequence together."""
    if segments.all_sum is identity or not shares:
        return shares
    sums = shares[others:]
    together = [*shares[:others], *([torch.stack(sums, 1)] if sums else [])]
    flat = segments.all_sum(torch.cat([share.reshape(-1) for share in together]))
    parts = flat.split([share.numel() for share in together])
    found = [part.view(share.shape) for part, share in zip(parts, together, strict=True)]
    return [*found[:others], *(found[-1].unbind(1) if sums else ())]
