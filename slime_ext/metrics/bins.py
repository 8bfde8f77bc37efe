"""The curves: token columns summed per bin of position, of age and of probability.

All are the same bits every time: additions in the tokens' order on the CPU, a product with a 0-1 matrix
elsewhere.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slime_ext.metrics.layout import (
    AGES,
    CURVE_BINS,
    CURVE_COLUMNS,
    CURVES,
    LOG_PROBABILITIES,
    POSITIONS,
)
from slime_ext.ops import arrays
from slime_ext.ops.runs import runs
from slime_ext.ops.segments import as_numbers
from slime_ext.ops.tally import count, product, tally
from slime_ext.outcome import Outcome, Tokens

FLAGS = 2  # how many of the columns count tokens, the first
SUMMED = len(CURVE_COLUMNS) - FLAGS  # how many are sums
STANDINGS = 3  # of a token: not finite, finite but not kept, kept
AGES_AND_NONE = (*AGES, math.inf)  # beyond which unknown ages lie, which are NaN
EDGES = (LOG_PROBABILITIES, AGES_AND_NONE)  # that a device is told, in DTYPES
DTYPES = (torch.float32, torch.float64)


class Places(NamedTuple):
    """Where tokens lie among the bins of all curves together: (age * CURVE_BINS + position) * CURVE_BINS +
    probability."""

    index: Tensor  # [SUMMED, T] integers; row i is i * bins beyond the first
    bins: int


def places_of(tokens: Tokens, dtype: torch.dtype) -> Places:
    """On a CPU.

    Args:
        dtype: in which log-probs are compared with the edges.
    """
    behavior, ages = tokens.behavior.detach(), tokens.ages
    bins = CURVE_BINS**2 * (1 if ages is None else CURVE_BINS + 1)
    found = runs(tokens.segments, POSITIONS)
    first = np.add.outer(np.arange(SUMMED) * bins, found.bins * CURVE_BINS).astype(np.int16)
    index = arrays.repeated(first, found.lengths)
    index += arrays.reached(behavior.to(dtype), LOG_PROBABILITIES)
    if ages is not None:
        index.add_(tokens.segments.spread(_age_bins(tokens).short()), alpha=CURVE_BINS**2)
    return Places(index, bins)


def kept_by_place(places: Places, finite: Tensor, keep: Tensor) -> Tensor:
    """[bins, 2] float64, finite and kept tokens at each place. On a CPU.

    Args:
        finite, keep: [T] bool, the second inside the first.
    """
    standing = finite.view(torch.uint8) + keep.view(torch.uint8)
    found = count(torch.add(standing, places.index[0], alpha=STANDINGS), STANDINGS * places.bins)
    return found.view(places.bins, STANDINGS).double() @ _counted()


@functools.lru_cache
def _counted() -> Tensor:
    """What counts as finite, and as kept."""
    return torch.tensor([(0, 0), (1, 0), (1, 1)], dtype=torch.float64)


def sums_by_place(places: Places, kept: Tensor, rows: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """[2] the finite and the kept tokens; 3 x 8 x 5 numbers in parts, for position, age and probability the
    columns' sums in each bin. On a CPU: tokens are added one after the other. An infinite number makes NaN of
    the bins that it is not in.

    Args:
        kept: [bins, 2] those at each place.
        rows: [T] each, k3, excess and weight.
    """
    index, bins = places
    summed = torch.empty(index.shape, dtype=torch.float64)  # bincount adds in the dtype of the row
    for own, row in zip(summed, rows, strict=True):
        own.copy_(row)
    k3, *others = (
        torch.bincount(index.view(-1), summed.view(-1), SUMMED * bins).view(SUMMED, bins, 1).unbind()
    )
    table = torch.empty(bins, len(CURVE_COLUMNS), dtype=torch.float64)
    torch.cat([kept, *others, k3], 1, out=table)
    every, *curves = (_margins(bins // CURVE_BINS**2) @ table).split((1, *(CURVE_BINS,) * len(CURVES)))
    return every[0, :FLAGS], [curve.view(-1) for curve in curves]


@functools.lru_cache
def _margins(ages: int) -> Tensor:
    """[1 + 3 x 8, ages x 8 x 8] 0-1 in float64: all places; those of each position; of each age, none where
    none is known; of each probability."""
    age, position, probability = np.indices((ages, CURVE_BINS, CURVE_BINS)).reshape(3, -1)
    age = age if ages > 1 else age - 1
    rows = [np.equal.outer(np.arange(CURVE_BINS), place) for place in (position, age, probability)]
    return torch.from_numpy(np.concatenate([np.ones((1, len(age))), *rows]))


def announce_curves(tokens: Tokens) -> None:
    """Has what ``sums_by_product`` reads wait for the first copy of the call."""
    parcel, found = tokens.segments.parcel, functools.cache(lambda: runs(tokens.segments, POSITIONS))
    parcel.add("runs", lambda: found().lengths.astype(np.int32))
    parcel.add("their places", lambda: _places_without_age(found().bins))
    parcel.add("their sequences", lambda: found().sequences.astype(np.int32))
    parcel.add("bins", lambda: np.arange(CURVE_BINS, dtype=np.int32))
    for edges, dtype in itertools.product(EDGES, DTYPES):
        parcel.expect(edges, dtype)


def sums_by_product(tokens: Tokens, columns: Tensor, behavior: Tensor) -> Sequence[Tensor]:
    """The numbers of ``sums_by_place`` on a device, by a product with a 0-1 matrix.

    Args:
        columns: [5, T] of CURVE_COLUMNS.
        behavior: [T] log-probs, nats.
    """
    parcel = tokens.segments.parcel
    places = parcel.take("bins").new_empty(len(CURVES), len(behavior))
    owners = torch.repeat_interleave(parcel.take("runs"), output_size=len(behavior))
    torch.index_select(_of_runs(tokens), 1, owners, out=places[:2])
    edges = tokens.segments.numbers(LOG_PROBABILITIES, behavior)
    torch.bucketize(behavior, edges, right=True, out_int32=True, out=places[2])
    return (product(places, columns, parcel.take("bins")).view(-1),)


def _places_without_age(positions: np.ndarray) -> np.ndarray:
    """[R] -> [2 R], bins of position, then those of unknown ages."""
    return np.append(positions, np.full_like(positions, CURVE_BINS)).astype(np.int32)


def _of_runs(tokens: Tokens) -> Tensor:
    """[2, R] int32, a run's bin of position, and that of its age: one more where that is unknown."""
    places = tokens.segments.parcel.take("their places").view(2, -1)
    if tokens.ages is None:
        return places
    sequences = tokens.segments.parcel.take("their sequences")
    return torch.stack([places[0], _age_bins(tokens).index_select(0, sequences)])


def traced_sums(tokens: Tokens, outcome: Outcome, rows: Sequence[Tensor]) -> tuple[Tensor]:
    """The numbers of ``sums_by_place`` where a compiler records.

    Args:
        rows: [T] each, the first excess, weight, k3 and log behavior.
    """
    excess, weight, k3, behavior = rows[:4]
    flags = (as_numbers(flag, outcome.log_ratio.dtype) for flag in (outcome.finite, outcome.keep))
    columns = torch.stack([*flags, excess, weight, k3])
    segments = tokens.segments
    place = _bin(segments.within, POSITIONS) * CURVE_BINS + _bin(behavior, LOG_PROBABILITIES)
    ages = 1
    if tokens.ages is not None:
        ages = CURVE_BINS + 1
        known = _bin(tokens.ages, AGES)
        of_sequences = torch.where(tokens.ages.isnan(), CURVE_BINS, known)
        place = of_sequences.index_select(0, segments.ids) * CURVE_BINS**2 + place
    table = tally(place.long(), columns, ages * CURVE_BINS**2)
    table = table.view(len(columns), ages, CURVE_BINS, CURVE_BINS)
    by_age = table.sum((2, 3))[:, :CURVE_BINS]
    by_age = torch.zeros_like(table[:, 0, 0]) if ages == 1 else by_age
    return (torch.stack([table.sum((1, 3)), by_age, table.sum((1, 2))]).transpose(1, 2).reshape(-1),)


def _bin(values: Tensor, edges: Sequence[float]) -> Tensor:
    """int32, how many edges a value has reached, in one loop of a compiler's."""
    return functools.reduce(operator.add, ((values >= edge).to(torch.int32) for edge in edges))


def _age_bins(tokens: Tokens) -> Tensor:
    """[S] int32; one bin more where the age is unknown."""
    edges = tokens.segments.numbers(AGES_AND_NONE, tokens.ages)
    return torch.bucketize(tokens.ages, edges, right=True, out_int32=True)
