"""From the tokens of one micro-batch to numbers that add up: a pure function of tensors.

Its shapes depend on the correction alone, its number of operations on nothing, and nothing here waits for the
device. All are the same bits every time: reductions, and additions of ones in any order; how the curves are
added up stands in ``bins``, how columns are in ``columns``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slime_ext.correction import Outcome, Sequences, Tokens
from slime_ext.metrics.columns import Columns, traced
from slime_ext.metrics.columns_on_device import announce_queries, on_device
from slime_ext.metrics.layout import FIRST, HIGHEST, LOG_SUMS, SHIFT, SIDE, Layout
from slime_ext.metrics.measure_on_cpu import on_cpu
from slime_ext.ops import arrays
from slime_ext.ops.segments import Segments, is_traced
from slime_ext.ops.tally import count

MULTIPLES = (2, 1, -1)  # of the log-ratios, of which logarithms of sums are taken, and maxima
NO_AGES = (0, 0, -math.inf)  # how many sequences have an age, the sum of these ages and the largest


class Measured(NamedTuple):
    """Sufficient statistics of some tokens, float64."""

    sums: Tensor  # added
    highest: Tensor  # [H] the larger is taken
    log_sums: Tensor  # [2] logarithms of sums, added as such

    def __add__(self, other: Measured) -> Measured:
        return Measured(
            self.sums + other.sums,
            torch.maximum(self.highest, other.highest),
            torch.logaddexp(self.log_sums, other.log_sums),
        )


@torch.no_grad()
def measure(
    tokens: Tokens,
    outcome: Outcome,
    layout: Layout,
    *,
    surrogate_clipped: Tensor | None = None,
    first: bool = True,
) -> Measured:
    """What a micro-batch adds to the metrics of the optimizer step.

    Args:
        outcome: of the correction, observed.
        surrogate_clipped: [T] bool, where a surrogate of ours clipped.
        first: whether this rank is the one that counts the sequences it shares with others.
    """
    if arrays.is_array(outcome.log_ratio):
        parts = on_cpu(tokens, outcome, layout, surrogate_clipped, first=first)
        return Measured(*map(torch.from_numpy, parts))
    kept, (*before, behavior, excess_squared, weight_squared), acted, ends, curves = _columns_of(
        tokens, outcome, layout
    )
    log_ratio, per_sequence, highest, log_sums = _of_sequences(outcome.sequences, tokens, first=first)
    columns = (*kept, *before, log_ratio, behavior, excess_squared, weight_squared)
    clipped = acted[-1:] if surrogate_clipped is None else surrogate_clipped.sum(0, keepdim=True)
    parts = [*columns, acted[:-1], clipped, *per_sequence]
    parts += [*_histogram(outcome.log_ratio, tokens.segments), *curves, *ends, *highest, log_sums]
    every = torch.cat(_joinable(parts))
    return Measured(*every.split((every.numel() - len(HIGHEST) - len(LOG_SUMS), len(HIGHEST), len(LOG_SUMS))))


def announce(tokens: Tokens, layout: Layout) -> None:
    """Has all that a device needs to know of what is measured wait for the first copy of the call."""
    for numbers in (MULTIPLES, NO_AGES):
        tokens.segments.parcel.expect(numbers, torch.float64)
    announce_queries(tokens, layout)


def _columns_of(tokens: Tokens, outcome: Outcome, layout: Layout) -> Columns:
    if is_traced(outcome.log_ratio):
        return traced(tokens, outcome, layout)
    return on_device(tokens, outcome, layout)


def _joinable(parts: list[Tensor]) -> list[Tensor]:
    """In float64 where that had better be done before parts are joined: CUDA joins at once what has one
    dtype, and copies all else in turn."""
    return parts if is_traced(parts[0]) or parts[0].is_cpu else [part.double() for part in parts]


def nothing(layout: Layout, device: torch.device | str = "cpu") -> Measured:
    """What no tokens add."""
    empty = torch.zeros(0, dtype=torch.float64, device=device)
    no = empty > 0
    outcome = Outcome(empty, no, no, empty, no, no.int(), Sequences(empty, empty, no))
    return measure(Tokens(Segments.whole([], no), empty, empty), outcome, layout)


def _histogram(log_ratio: Tensor, segments: Segments) -> list[Tensor]:
    """Tokens per bin of |l|, 16 per power of 2 from 2^-20 to 2^7 nats: BINS numbers in parts, those above 0
    first.

    A token without a finite log-prob has l = 0 and lies in no bin.
    """
    every = 1 << (31 - SHIFT)
    narrow = log_ratio.float()
    index = (narrow.view(torch.int32) >> SHIFT).add_(every)  # the sign, too, is one of the bits
    one = None if is_traced(index) else segments.parcel.take(((1,), torch.float64))
    (sides,) = _joinable([count(index, 2 * every, one).view(2, every)])
    beyond = sides[:, FIRST + SIDE :].sum(1, keepdim=True)
    inside = sides[:, FIRST : FIRST + SIDE]
    return [inside[1], beyond[1], inside[0], beyond[0]]


def _of_sequences(
    seen: Sequences, tokens: Tokens, *, first: bool
) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor], Tensor]:
    """The sum of log-ratios; sums, maxima and logarithms of sums over the sequences that have response
    tokens."""
    log_ratio, count, segments = seen.log_ratio, seen.count, tokens.segments
    if not first or not count.numel():
        zeros, none = count.new_zeros(6), count.new_full((6,), -math.inf)
        return zeros[:1], (zeros[1:],), (none[:3],), none[:2]
    there = count > 0
    ages = () if tokens.ages is None else (tokens.ages == tokens.ages, tokens.ages.nan_to_num())
    table = torch.stack([log_ratio, count, there, seen.keep, *ages])
    sums = torch.mv(table, table[2])
    none = table[2].log()  # 0, or -inf where no tokens are
    candidates = torch.addcmul(none, log_ratio, segments.numbers(MULTIPLES, log_ratio)[:, None])
    highest, log_sums = candidates[1:].amax(1), candidates[:2].logsumexp(1)
    if ages:
        oldest = (tokens.ages + none).nan_to_num(nan=-math.inf, neginf=-math.inf).amax(0, True)
        return sums[:1], (sums[1:],), (highest, oldest), log_sums
    aged = segments.numbers(NO_AGES, log_ratio)
    return sums[:1], (sums[1:], aged[:2]), (highest, aged[2:]), log_sums
