"""From the tokens of one micro-batch to numbers that add up: a pure function of tensors.

Its shapes depend on the correction alone, its number of operations on nothing, and nothing here waits for the
device. Sums over tokens are of two levels: blocks of 256 in the dtype of the log-ratios (float32 or more),
the blocks in float64. All are the same bits every time: reductions, additions of ones in any order, and for
the curves additions in the tokens' order on the CPU, a product with a 0-1 matrix elsewhere.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from slime_ext.correction import Outcome, Sequences, Tokens
from slime_ext.metrics.layout import (
    AGES,
    COLUMNS,
    CURVE_BINS,
    CURVE_COLUMNS,
    FIRST,
    LOG_PROBABILITIES,
    POSITIONS,
    SHIFT,
    SIDE,
    Layout,
)
from slime_ext.ops.segments import Segments, as_numbers, host_ints, is_traced
from slime_ext.ops.tally import count, product, tally

BLOCK = 256
# Ratios and weights beyond count as this much in the sums, whose squares stay finite so.
LARGEST = {torch.float64: 1e150, torch.float32: 1e17}


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
        histogram: [BINS] float64, where a kernel has counted it already; as ``_histogram``.
    """
    rows = _rows(tokens, outcome, layout, surrogate_clipped)
    per_sequence, highest, log_sums = _of_sequences(outcome.sequences, tokens.ages, first=first)
    if histogram is None:
        histogram = _histogram(outcome.log_ratio)
    sums = _totals(rows)
    sums = [sums if surrogate_clipped is not None else pad(sums, (0, 1)), per_sequence, histogram]
    if layout.curves:
        sums.append(_curves(tokens, rows))
    return Measured(torch.cat(sums), torch.cat([_extremes(outcome), highest]), log_sums)


def nothing(layout: Layout, device: torch.device | str = "cpu") -> Measured:
    """What no tokens add."""
    empty = torch.zeros(0, dtype=torch.float64, device=device)
    no = empty > 0
    outcome = Outcome(empty, no, no, empty, no, no.int(), Sequences(empty, empty, no))
    return measure(Tokens(Segments.whole([], no), empty, empty), outcome, layout)


def _rows(tokens: Tokens, outcome: Outcome, layout: Layout, clipped: Tensor | None) -> Sequence[Tensor]:
    """The rows of ``layout.COLUMNS``, those of the flags and the surrogate's, [T] each."""
    made = _traced_rows if is_traced(outcome.log_ratio) else _table
    return made(tokens, outcome, layout, clipped)


def _traced_rows(tokens: Tokens, outcome: Outcome, layout: Layout, clipped: Tensor | None) -> list[Tensor]:
    log_ratio, dtype = outcome.log_ratio, outcome.log_ratio.dtype
    counted, kept = (as_numbers(flags, dtype) for flags in (outcome.finite, outcome.keep))
    # The ratio less 1: its sums lose no digits where policies are close.
    excess, weight = (x.clamp(max=LARGEST[dtype]) for x in (log_ratio.expm1(), outcome.weights.to(dtype)))
    behavior = torch.where(outcome.finite, tokens.behavior.to(dtype), 0)
    rows = [counted, kept, excess, weight, excess - log_ratio, log_ratio, behavior]
    flagged = [((outcome.acted & bits) != 0) & tokens.segments.mask for _, bits in layout.flags]
    flagged += [] if clipped is None else [clipped != 0]
    return [*rows, excess.square(), weight.square(), *(as_numbers(flag, dtype) for flag in flagged)]


def _table(tokens: Tokens, outcome: Outcome, layout: Layout, clipped: Tensor | None) -> Tensor:
    """The same rows, written once."""
    log_ratio, flags = outcome.log_ratio, [bits for _, bits in layout.flags]
    count, most = len(COLUMNS), LARGEST[log_ratio.dtype]
    table = log_ratio.new_empty(count + len(flags) + (clipped is not None), log_ratio.numel())
    counted, kept, excess, weight, k3, ratios, behavior, _, _ = table[:count]
    for row, flag in ((counted, outcome.finite), (kept, outcome.keep)):
        row.copy_(flag.view(torch.uint8))
    torch.expm1(log_ratio, out=excess)
    weight.copy_(outcome.weights)
    table[2:4].clamp_(max=most)
    torch.sub(excess, log_ratio, out=k3)
    ratios.copy_(log_ratio)
    behavior.copy_(torch.where(outcome.finite, tokens.behavior, 0))
    torch.square(table[2:4], out=table[count - 2 : count])
    acted = outcome.acted * tokens.segments.mask.view(torch.uint8)
    table[count : count + len(flags)].copy_(acted & host_ints(flags, acted.device).int()[:, None])
    if clipped is not None:
        table[-1].copy_(clipped)
    table[count:].clamp_(max=1)
    return table


def _totals(rows: Sequence[Tensor]) -> Tensor:
    """[K] float64, the sum of each row."""
    if not isinstance(rows, Tensor):
        return torch.stack([row.sum(dtype=torch.float64) for row in rows])
    whole = rows.shape[1] // BLOCK * BLOCK
    blocks = rows[:, :whole].unflatten(1, (whole // BLOCK, BLOCK)).sum(2)
    return torch.cat([blocks, rows[:, whole:]], 1).sum(1, dtype=torch.float64)


def _histogram(log_ratio: Tensor) -> Tensor:
    """[BINS] tokens per bin of |l|, 16 per power of 2 from 2^-20 to 2^7 nats; above 0, then below.

    A token without a finite log-prob has l = 0 and lies in no bin.
    """
    every = 1 << (31 - SHIFT)
    index = (log_ratio.float().view(torch.int32) >> SHIFT) + every  # the sign, too, is one of the bits
    below, above = count(index.long(), 2 * every).view(2, every)
    sides = torch.stack([above, below])
    beyond = sides[:, FIRST + SIDE :].sum(1, keepdim=True)
    return torch.cat([sides[:, FIRST : FIRST + SIDE], beyond], 1).view(-1)


def _extremes(outcome: Outcome) -> Tensor:
    """[3] largest and negated smallest log-ratio, largest weight; -inf for none."""
    log_ratio, finite = outcome.log_ratio, outcome.finite
    if not log_ratio.numel():
        return log_ratio.new_full((3,), -torch.inf, dtype=torch.float64)
    highest, lowest = (torch.where(finite, log_ratio, far) for far in (-torch.inf, torch.inf))
    return torch.stack([highest.amax(), -lowest.amin(), outcome.weights.amax()]).double()


def _of_sequences(seen: Sequences, ages: Tensor | None, *, first: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Sums, maxima and logarithms of sums over the sequences that have response tokens."""
    log_ratio, tokens = seen.log_ratio, seen.count
    if not first or not tokens.numel():
        none = tokens.new_full((3,), -torch.inf)
        return tokens.new_zeros(5), none, none[:2]
    there = tokens > 0
    sums = torch.stack([tokens, there.double(), (there & seen.keep).double()]).sum(1)
    candidates = torch.where(there, torch.stack([2 * log_ratio, log_ratio, -log_ratio]), -torch.inf)
    highest, log_sums = candidates[1:].amax(1), candidates[:2].logsumexp(1)
    if ages is None:
        return pad(sums, (0, 2)), pad(highest, (0, 1), value=-torch.inf), log_sums
    aged, oldest = _aged(there, ages)
    return torch.cat([sums, aged]), torch.cat([highest, oldest]), log_sums


def _aged(there: Tensor, ages: Tensor) -> tuple[Tensor, Tensor]:
    """[2] how many sequences have an age and the sum of their ages; [1] the largest."""
    known = there & ~ages.isnan()
    ages = torch.where(known, ages.double(), -torch.inf)
    return torch.stack([known.sum(), torch.where(known, ages, 0).sum()]), ages.amax()[None]


def _curves(tokens: Tokens, rows: Sequence[Tensor]) -> Tensor:
    """The first columns summed per bin of position, age and probability: 3 x 8 x 5 numbers."""
    segments, columns = tokens.segments, rows[: len(CURVE_COLUMNS)]
    position = _bin(segments.within, POSITIONS)
    probability = _bin(rows[COLUMNS.index("log_behavior")], LOG_PROBABILITIES)
    age = _age_bins(segments, tokens.ages)
    if not adds_in_order(position.device):
        age = torch.full_like(position, CURVE_BINS) if age is None else age
        return product([position, age, probability], columns, CURVE_BINS).view(-1)
    place = position * CURVE_BINS + probability
    place = place if age is None else age * CURVE_BINS**2 + place
    shape = (len(columns), 1 if age is None else CURVE_BINS + 1, CURVE_BINS, CURVE_BINS)
    table = tally(place.long(), columns, shape[1] * CURVE_BINS**2).view(shape)
    by_age = table.sum((2, 3))[:, :CURVE_BINS]
    by_age = torch.zeros_like(table[:, 0, 0]) if age is None else by_age
    return torch.stack([table.sum((1, 3)), by_age, table.sum((1, 2))]).transpose(1, 2).reshape(-1)


def adds_in_order(device: torch.device) -> bool:
    """Whether additions at random places are made one after the other, so that they repeat bit by bit."""
    return device.type == "cpu"


def _bin(values: Tensor, edges: Sequence[float]) -> Tensor:
    """int32, how many edges a value has reached: half the time of a search among them."""
    if is_traced(values):  # one loop of it all
        return functools.reduce(operator.add, ((values >= edge).to(torch.int32) for edge in edges))
    reached = values >= _constant(edges, values)[:, None]
    return reached.view(torch.uint8).sum(0, dtype=torch.uint8).int()


def _age_bins(segments: Segments, ages: Tensor | None) -> Tensor | None:
    """[T] int32; one bin more where the age is unknown."""
    if ages is None:
        return None
    return segments.spread(torch.where(ages.isnan(), CURVE_BINS, _bin(ages, AGES)))


def _constant(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Numbers known to the host, without waiting for the device; nothing is held between calls."""
    values = torch.tensor(numbers, dtype=like.dtype)
    return values if like.device.type == "cpu" else values.pin_memory().to(like.device, non_blocking=True)
