"""The curves: token columns summed per bin of position, of age and of probability.

All are the same bits every time: additions in the tokens' order on the CPU, a product with a 0-1 matrix
elsewhere.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slime_ext.metrics.layout import AGES, CURVE_BINS, CURVE_COLUMNS, LOG_PROBABILITIES, POSITIONS
from slime_ext.ops.grid import host_ints, host_numbers
from slime_ext.ops.runs import runs
from slime_ext.ops.segments import as_bytes, as_numbers, is_traced
from slime_ext.ops.tally import count, product, tally
from slime_ext.outcome import Outcome, Tokens

STANDING = ((0, 0), (1, 0), (1, 1))  # lost, finite, kept: what counts as counted and as kept


def curve_sums(tokens: Tokens, outcome: Outcome, rows: Sequence[Tensor]) -> Sequence[Tensor]:
    """3 x 8 x 5 numbers in parts: for position, age and probability the columns' sums in each bin.

    Args:
        rows: [T] or more each, the first excess, weight, k3 and log behavior.
    """
    excess, weight, k3, behavior = (row[: outcome.log_ratio.numel()] for row in rows[:4])
    if is_traced(behavior):
        return _traced(tokens, behavior, _columns(outcome, excess, weight, k3))
    owners, position, age = _of_runs(tokens)
    if adds_in_order(behavior.device):
        place = position if age is None else torch.add(position, age, alpha=CURVE_BINS)
        place = torch.add(_probability_bins(behavior), place.index_select(0, owners), alpha=CURVE_BINS)
        table = _binned(place, 1 if age is None else CURVE_BINS + 1, outcome, rows)
        return _margins(table)
    age = torch.full_like(position, CURVE_BINS) if age is None else age
    places = [bins.index_select(0, owners) for bins in (position, age)]
    columns = _columns(outcome, excess, weight, k3)
    return (product([*places, _bin(behavior, LOG_PROBABILITIES)], columns, CURVE_BINS).view(-1),)


def _columns(outcome: Outcome, *rows: Tensor) -> Tensor:
    flags = (as_numbers(flag, outcome.log_ratio.dtype) for flag in (outcome.finite, outcome.keep))
    return torch.stack([*flags, *rows])


def _of_runs(tokens: Tokens) -> tuple[Tensor, Tensor, Tensor | None]:
    """[T] int32 the run of each token; [R] bytes its bin of position; [R] int16 that of its age, one more
    where it is unknown."""
    segments = tokens.segments
    found = runs(segments, POSITIONS)
    lengths = host_ints(found.lengths.astype(np.int32), segments.device)
    owners = torch.repeat_interleave(lengths, output_size=segments.size)
    position = host_ints(found.bins.astype(np.uint8), segments.device)
    if tokens.ages is None:
        return owners, position, None
    sequences = host_ints(found.sequences, segments.device)
    return owners, position, _age_bins(tokens.ages).index_select(0, sequences)


def _traced(tokens: Tokens, behavior: Tensor, columns: Tensor) -> tuple[Tensor]:
    segments = tokens.segments
    place = _bin(segments.within, POSITIONS) * CURVE_BINS + _bin(behavior, LOG_PROBABILITIES)
    ages = 1
    if tokens.ages is not None:
        ages = CURVE_BINS + 1
        place = segments.spread(_age_bins(tokens.ages)) * CURVE_BINS**2 + place
    table = tally(place.long(), columns, ages * CURVE_BINS**2)
    table = table.view(len(columns), ages, CURVE_BINS, CURVE_BINS)
    by_age = table.sum((2, 3))[:, :CURVE_BINS]
    by_age = torch.zeros_like(table[:, 0, 0]) if ages == 1 else by_age
    return (torch.stack([table.sum((1, 3)), by_age, table.sum((1, 2))]).transpose(1, 2).reshape(-1),)


def _binned(place: Tensor, ages: int, outcome: Outcome, rows: Tensor) -> Tensor:
    """[ages, positions, probabilities, 5] float64, the curves' columns at each place, on a CPU: tokens
    are added one after the other.

    Args:
        place: [T] bytes or int16, (age * CURVE_BINS + position) * CURVE_BINS + probability.
    """
    bins = ages * CURVE_BINS**2
    known = as_bytes(outcome.finite) + as_bytes(outcome.keep)
    flags = count(torch.add(known, place, alpha=len(STANDING)), len(STANDING) * bins)
    flags = flags.view(bins, len(STANDING)) @ host_numbers(STANDING, flags)
    summed = rows[:3, : len(place)].double().unbind()  # bincount adds in the dtype of the row
    sums = [torch.bincount(place, row, bins) for row in summed]
    return torch.stack([*flags.unbind(1), *sums], 1).view(ages, CURVE_BINS, CURVE_BINS, -1)


def _margins(table: Tensor) -> tuple[Tensor, ...]:
    """[ages, positions, probabilities, 5] -> by position, by age (0 where no age is known), by
    probability."""
    if len(table) > 1:
        by_age = table.sum((1, 2))[:CURVE_BINS]
    else:
        by_age = host_numbers(((0.0,) * len(CURVE_COLUMNS),) * CURVE_BINS, table)
    return table.sum((0, 2)).view(-1), by_age.reshape(-1), table.sum((0, 1)).view(-1)


def _probability_bins(log_probs: Tensor) -> Tensor:
    """[T] bytes, how many edges a log-prob has reached: how far it lies above the number before each, as
    truth values, which is a third of the time of a comparison."""
    before = tuple(_before(edge, log_probs.dtype) for edge in LOG_PROBABILITIES)
    above = (log_probs - host_numbers(before, log_probs)[:, None]).clamp_min_(0).to(torch.bool)
    return above.view(torch.uint8).sum(0, dtype=torch.uint8)


def _before(edge: float, dtype: torch.dtype) -> float:
    """The largest number of a dtype that is smaller than an edge < 0."""
    real, whole = ("f", "i") if dtype is torch.float32 else ("d", "q")
    (bits,) = struct.unpack(whole, struct.pack(real, edge))
    return struct.unpack(real, struct.pack(whole, bits + 1))[0]


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
