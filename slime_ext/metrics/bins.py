"""The curves: token columns summed per bin of position, of age and of probability.

All are the same bits every time: additions in the tokens' order on the CPU, a product with a 0-1 matrix
elsewhere.
"""

from __future__ import annotations

import functools
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
from slime_ext.ops.grid import host_ints, host_numbers
from slime_ext.ops.runs import runs
from slime_ext.ops.segments import as_numbers, is_traced
from slime_ext.ops.tally import product, tally
from slime_ext.outcome import K3, WEIGHT, Outcome, Tokens

FLAGS = 2  # how many of the columns count tokens, the first
SUMMED = len(CURVE_COLUMNS) - FLAGS  # how many are sums


class Places(NamedTuple):
    """Where tokens lie among the bins of all curves together: (age * CURVE_BINS + position) * CURVE_BINS +
    probability."""

    index: Tensor  # [SUMMED, T] integers; row i is i * bins beyond the first
    bins: int


def places_of(tokens: Tokens, dtype: torch.dtype) -> Places | None:
    """None where tokens are not added in order.

    Args:
        dtype: in which log-probs are compared with the edges.
    """
    behavior, ages = tokens.behavior.detach(), tokens.ages
    if is_traced(behavior) or not adds_in_order(behavior.device):
        return None
    bins = CURVE_BINS**2 * (1 if ages is None else CURVE_BINS + 1)
    found = runs(tokens.segments, POSITIONS)
    first = np.add.outer(np.arange(SUMMED) * bins, found.bins * CURVE_BINS).astype(np.int16)
    index = arrays.repeated(first, found.lengths)
    index += arrays.reached(behavior.to(dtype), LOG_PROBABILITIES)
    if ages is not None:
        index.add_(tokens.segments.spread(_age_bins(ages)), alpha=CURVE_BINS**2)
    return Places(index, bins)


def sums_by_place(places: Places, kept: Tensor, room: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    """[2] the finite and the kept tokens, and the numbers of ``curve_sums``, on a CPU: tokens are added one
    after the other. An infinite number makes NaN of the bins that it is not in.

    Args:
        kept: [bins, 2] those at each place.
        room: of the outcome, filled.
    """
    index, bins = places
    summed = torch.empty(index.shape, dtype=torch.float64)  # bincount adds in the dtype of the row
    summed.copy_(room[K3 : WEIGHT + 1, : index.shape[1]])
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


def curve_sums(tokens: Tokens, outcome: Outcome, rows: Sequence[Tensor]) -> Sequence[Tensor]:
    """3 x 8 x 5 numbers in parts: for position, age and probability the columns' sums in each bin. For graphs
    and for devices that do not add in order.

    Args:
        rows: [T] or more each, the first excess, weight, k3 and log behavior.
    """
    excess, weight, k3, behavior = (row[: outcome.log_ratio.numel()] for row in rows[:4])
    flags = (as_numbers(flag, outcome.log_ratio.dtype) for flag in (outcome.finite, outcome.keep))
    columns = torch.stack([*flags, excess, weight, k3])
    if is_traced(behavior):
        return _traced(tokens, behavior, columns)
    places = [*_of_runs(tokens), _bin(behavior, LOG_PROBABILITIES)]
    return (product(places, columns, CURVE_BINS).view(-1),)


def _of_runs(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """[T] each, a token's bin of position, and that of its age: one more where that is unknown."""
    found, segments = runs(tokens.segments, POSITIONS), tokens.segments
    lengths = host_ints(found.lengths.astype(np.int32), segments.device)
    owners = torch.repeat_interleave(lengths, output_size=segments.size)
    position = host_ints(found.bins.astype(np.uint8), segments.device).index_select(0, owners)
    if tokens.ages is None:
        return position, torch.full_like(position, CURVE_BINS)
    sequences = host_ints(found.sequences, segments.device)
    return position, _age_bins(tokens.ages).index_select(0, sequences).index_select(0, owners)


def _traced(tokens: Tokens, behavior: Tensor, columns: Tensor) -> tuple[Tensor]:
    segments = tokens.segments
    place = _bin(segments.within, POSITIONS) * CURVE_BINS + _bin(behavior, LOG_PROBABILITIES)
    ages = 1
    if tokens.ages is not None:
        ages = CURVE_BINS + 1
        place = _age_bins(tokens.ages).index_select(0, segments.ids) * CURVE_BINS**2 + place
    table = tally(place.long(), columns, ages * CURVE_BINS**2)
    table = table.view(len(columns), ages, CURVE_BINS, CURVE_BINS)
    by_age = table.sum((2, 3))[:, :CURVE_BINS]
    by_age = torch.zeros_like(table[:, 0, 0]) if ages == 1 else by_age
    return (torch.stack([table.sum((1, 3)), by_age, table.sum((1, 2))]).transpose(1, 2).reshape(-1),)


def adds_in_order(device: torch.device) -> bool:
    """Whether additions at random places are made one after the other, so that they repeat bit by bit."""
    return device.type == "cpu"


def _bin(values: Tensor, edges: Sequence[float]) -> Tensor:
    """int32, how many edges a value has reached: half the time of a search among them."""
    if is_traced(values):  # one loop of it all
        return functools.reduce(operator.add, ((values >= edge).to(torch.int32) for edge in edges))
    reached = values >= host_numbers(edges, values)[:, None]
    return reached.view(torch.uint8).sum(0, dtype=torch.uint8).int()


def _age_bins(ages: Tensor) -> Tensor:
    """[S] int16; one bin more where the age is unknown."""
    return torch.where(ages.isnan(), CURVE_BINS, _bin(ages, AGES)).to(torch.int16)
