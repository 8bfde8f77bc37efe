"""From the tokens of one micro-batch to numbers that add up: a pure function of tensors.

Its shapes depend on the correction alone, its number of operations on nothing, and nothing here waits for the
device. Sums are float64. Sums over tokens and histogram counts are deterministic: reductions, a product with
a 0-1 matrix, and an addition of ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slime_ext.correction import Outcome, Sequences, Tokens
from slime_ext.metrics.layout import (
    BINS,
    COLUMNS,
    CURVE_COLUMNS,
    CURVE_EDGES,
    LARGEST,
    PER_DECADE,
    SIDE,
    SMALLEST,
    Layout,
)
from slime_ext.ops.segments import Segments, as_numbers, host_ints


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
    histogram: Tensor | None = None,
) -> Measured:
    """What a micro-batch adds to the metrics of the optimizer step.

    Args:
        outcome: of the correction, observed.
        surrogate_clipped: [T] bool, where a surrogate of ours clipped.
        first: whether this rank is the one that counts the sequences it shares with others.
        histogram: [BINS] float64, where a kernel has counted it already.
    """
    segments = tokens.segments
    rows = _rows(tokens, outcome)
    per_sequence, highest, log_sums = _of_sequences(outcome.sequences, tokens.ages, first=first)
    if histogram is None:
        histogram = _histogram(rows[COLUMNS.index("log_ratio")], rows[0])
    sums = [torch.stack([row.sum() for row in rows]), _surrogate(surrogate_clipped, rows[0]), per_sequence]
    sums += [_flagged(outcome, segments.mask, layout), histogram]
    if layout.curves:
        sums.append(_curves(segments, tokens.ages, rows))
    return Measured(torch.cat(sums), torch.cat([_extremes(outcome), highest]), log_sums)


def nothing(layout: Layout, device: torch.device | str = "cpu") -> Measured:
    """What no tokens add."""
    empty = torch.zeros(0, dtype=torch.float64, device=device)
    no = empty > 0
    outcome = Outcome(empty, no, no, empty, no, no.int(), Sequences(empty, empty, no))
    return measure(Tokens(Segments.whole([], no), empty, empty), outcome, layout)


def _rows(tokens: Tokens, outcome: Outcome) -> list[Tensor]:
    """The rows of ``layout.COLUMNS``, [T] float64 each: never one table, whose rows would all be copied."""
    counted, kept = (as_numbers(flags, torch.float64) for flags in (outcome.finite, outcome.keep))
    log_ratio = outcome.log_ratio.double()
    # The ratio less 1: its sums lose no digits where policies are close.
    excess, weight = log_ratio.expm1().clamp_(max=LARGEST), outcome.weights.double().clamp(max=LARGEST)
    behavior = torch.where(outcome.finite, tokens.behavior, 0).double()
    curves = [counted, kept, excess, weight, excess - log_ratio]
    return [*curves, log_ratio, behavior, excess.square(), weight.square()]


def _surrogate(clipped: Tensor | None, row: Tensor) -> Tensor:
    """[1] how many tokens a surrogate clipped."""
    return row.new_zeros(1) if clipped is None else clipped.sum()[None].double()


def _flagged(outcome: Outcome, mask: Tensor, layout: Layout) -> Tensor:
    """[flags] response tokens that carry any of the bits."""
    bits = host_ints([bits for _, bits in layout.flags], mask.device).int()
    return (((outcome.acted & bits[:, None]) != 0) & mask).sum(1).double()


def _histogram(log_ratio: Tensor, counted: Tensor) -> Tensor:
    """[BINS] finite tokens per bin of the log-ratio: 32 per decade of |l| from 1e-6 to 100 nats, per sign."""
    decades = log_ratio.abs().log10_()  # a third of the time of a search among the edges
    distance = decades.mul_(PER_DECADE).add_(1 - SMALLEST * PER_DECADE).clamp_(0, SIDE + 1).trunc_()
    index = distance.copysign_(log_ratio).add_(SIDE + 1).long().clamp_(0, BINS - 1)  # a NaN is any integer
    return counted.new_zeros(BINS).index_add_(0, index, counted)


def _extremes(outcome: Outcome) -> Tensor:
    """[3] largest and negated smallest log-ratio, largest weight; -inf for none."""
    if not outcome.log_ratio.numel():
        return outcome.log_ratio.new_full((3,), -torch.inf, dtype=torch.float64)
    signed = (outcome.log_ratio, -outcome.log_ratio, outcome.weights)
    return torch.stack([torch.where(outcome.finite, row, -torch.inf).amax() for row in signed]).double()


def _of_sequences(seen: Sequences, ages: Tensor | None, *, first: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Sums, maxima and logarithms of sums over the sequences that have response tokens."""
    log_ratio, count = seen.log_ratio, seen.count
    if not first or not count.numel():
        none = count.new_full((3,), -torch.inf)
        return count.new_zeros(5), none, none[:2]
    there = count > 0
    sums = torch.stack([count, there.double(), (there & seen.keep).double()]).sum(1)
    candidates = torch.where(there, torch.stack([2 * log_ratio, log_ratio, -log_ratio]), -torch.inf)
    aged, oldest = _aged(there, ages)
    return torch.cat([sums, aged]), torch.cat([candidates[1:].amax(1), oldest]), candidates[:2].logsumexp(1)


def _aged(there: Tensor, ages: Tensor | None) -> tuple[Tensor, Tensor]:
    """[2] how many sequences have an age and the sum of their ages; [1] the largest."""
    if ages is None:
        none = there.new_zeros(2, dtype=torch.float64)
        return none, torch.full_like(none[:1], -torch.inf)
    known = there & ~ages.isnan()
    ages = torch.where(known, ages.double(), -torch.inf)
    return torch.stack([known.sum(), torch.where(known, ages, 0).sum()]), ages.amax()[None]


def _curves(segments: Segments, ages: Tensor | None, rows: Sequence[Tensor]) -> Tensor:
    """The first columns summed per bin of position, age and probability: 3 x 8 x 5 numbers."""
    behavior = rows[COLUMNS.index("log_behavior")]
    age = torch.full_like(behavior, torch.nan) if ages is None else segments.spread(ages)
    at = torch.stack([segments.within.double(), age.double(), behavior])
    beyond = at[:, None] >= _constant(CURVE_EDGES, at.device)[:, :, None]  # falling along the bins
    inside = as_numbers(beyond[:, :-1] ^ beyond[:, 1:], torch.float64).flatten(0, 1)
    return (inside @ torch.stack(rows[: len(CURVE_COLUMNS)], 1)).view(-1)


def _constant(values: Sequence, device: torch.device) -> Tensor:
    """float64 numbers known to the host, without waiting for the device; nothing is held between calls."""
    numbers = torch.tensor(values, dtype=torch.float64)
    return numbers if device.type == "cpu" else numbers.pin_memory().to(device, non_blocking=True)
