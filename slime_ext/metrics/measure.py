"""From the tokens of one micro-batch to numbers that add up: a pure function of tensors.

Its shapes depend on the correction alone, its number of operations on nothing, and nothing here waits for the
device. Sums over tokens are of two levels: blocks of 256 in the dtype of the log-ratios (float32 or more),
the blocks in float64. All are the same bits every time: reductions, and additions of ones in any order; how
the curves are added up stands in ``bins``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from slime_ext.correction import Outcome, Sequences, Tokens
from slime_ext.metrics.bins import curve_sums
from slime_ext.metrics.layout import FIRST, HIGHEST, LOG_SUMS, SHIFT, SIDE, Layout
from slime_ext.ops.codes import count_flags
from slime_ext.ops.grid import host_numbers
from slime_ext.ops.segments import Segments, as_numbers, is_traced
from slime_ext.ops.tally import count
from slime_ext.outcome import BLOCK

SIGNS = (1, -1, 1, 1, 1, 1)  # the smallest is the largest of the negated
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
) -> Measured:
    """What a micro-batch adds to the metrics of the optimizer step.

    Args:
        outcome: of the correction, observed.
        surrogate_clipped: [T] bool, where a surrogate of ours clipped.
        first: whether this rank is the one that counts the sequences it shares with others.
    """
    rows = _rows(tokens, outcome)
    flags = _flags(tokens, outcome, layout)
    of_tokens = _totals(rows)
    log_ratio, per_sequence, highest, log_sums = _of_sequences(outcome.sequences, tokens.ages, first=first)
    clipped = flags[-1:] if surrogate_clipped is None else surrogate_clipped.sum(0, keepdim=True)
    sums = [flags[:2], of_tokens[:3], log_ratio, of_tokens[3:], flags[2:-1], clipped, *per_sequence]
    sums += _histogram(outcome.log_ratio)
    if layout.curves:
        sums += curve_sums(tokens, outcome, rows)
    others = (*_extremes(outcome), *highest, log_sums)
    every = torch.cat([*sums, *others])
    sizes = (every.numel() - len(HIGHEST) - len(LOG_SUMS), len(HIGHEST), len(LOG_SUMS))
    found, extremes, log_sums = every.split(sizes)
    return Measured(found, extremes * host_numbers(SIGNS, extremes), log_sums)


def nothing(layout: Layout, device: torch.device | str = "cpu") -> Measured:
    """What no tokens add."""
    empty = torch.zeros(0, dtype=torch.float64, device=device)
    no = empty > 0
    outcome = Outcome(empty, no, no, empty, no, no.int(), Sequences(empty, empty, no))
    return measure(Tokens(Segments.whole([], no), empty, empty), outcome, layout)


def _rows(tokens: Tokens, outcome: Outcome) -> Sequence[Tensor]:
    """What is summed over tokens, [T] or more each: excess, weight, k3, log behavior, and two squares."""
    return (_traced_rows if is_traced(outcome.log_ratio) else _table)(tokens, outcome)


def _traced_rows(tokens: Tokens, outcome: Outcome) -> list[Tensor]:
    log_ratio, dtype = outcome.log_ratio, outcome.log_ratio.dtype
    excess, weight = (x.clamp(max=LARGEST[dtype]) for x in (outcome.excess, outcome.weights.to(dtype)))
    behavior = torch.where(outcome.finite, tokens.behavior.to(dtype), 0)
    return [excess, weight, excess - log_ratio, behavior, excess.square(), weight.square()]


def _table(tokens: Tokens, outcome: Outcome) -> Tensor:
    """The same rows, in the outcome's room."""
    log_ratio, room = outcome.log_ratio, outcome.room
    most, behavior = LARGEST[log_ratio.dtype], tokens.behavior.detach().to(log_ratio.dtype)
    excess, weight, k3, log_behavior, _, _ = rows = room[:, : log_ratio.numel()]
    excess.clamp_(max=most)
    torch.clamp(outcome.weights, max=most, out=weight)
    torch.sub(excess, log_ratio, out=k3)
    torch.where(outcome.finite, behavior, host_numbers(0, room), out=log_behavior)
    torch.square(rows[:2], out=rows[4:])
    return room


def _totals(rows: Sequence[Tensor]) -> Tensor:
    """[6] float64, the sum of each row."""
    if not isinstance(rows, Tensor):
        return torch.stack([row.sum(dtype=torch.float64) for row in rows])
    return rows.view(len(rows), rows.shape[1] // BLOCK, BLOCK).sum(2).sum(1, dtype=torch.float64)


def _flags(tokens: Tokens, outcome: Outcome, layout: Layout) -> Tensor:
    """[3 + F] finite tokens, kept ones, those that the layout's flags ask for, 0."""
    mask, finite, keep, acted = tokens.segments.mask, outcome.finite, outcome.keep, outcome.acted
    queries = tuple(bits for _, bits in layout.flags)
    if not is_traced(acted):
        return count_flags(acted, mask, finite, keep, (*queries, 0), outcome.rejects)
    carried = [((acted & bits) != 0) & mask for bits in queries]
    rows = [as_numbers(row, torch.float32).sum(dtype=torch.float64) for row in (finite, keep, *carried)]
    return pad(torch.stack(rows), (0, 1))


def _histogram(log_ratio: Tensor) -> list[Tensor]:
    """Tokens per bin of |l|, 16 per power of 2 from 2^-20 to 2^7 nats: BINS numbers in parts, those above 0
    first.

    A token without a finite log-prob has l = 0 and lies in no bin.
    """
    every = 1 << (31 - SHIFT)
    # The sign, too, is one of the bits.
    index = (log_ratio.float().view(torch.int32) >> SHIFT).add_(every)
    sides = count(index, 2 * every).view(2, every)
    beyond = sides[:, FIRST + SIDE :].sum(1, keepdim=True)
    below, above = sides[:, FIRST : FIRST + SIDE]
    return [above, beyond[1], below, beyond[0]]


def _extremes(outcome: Outcome) -> Sequence[Tensor]:
    """[1] each: largest and smallest log-ratio, largest weight; infinite for none."""
    log_ratio = outcome.log_ratio
    far = host_numbers(((-math.inf,), (math.inf,), (-math.inf,)), log_ratio)
    if not log_ratio.numel():
        return far
    highest, lowest = torch.where(outcome.finite, log_ratio, far[:2])
    return highest.amax(0, True), lowest.amin(0, True), outcome.weights.amax(0, True)


def _of_sequences(
    seen: Sequences, ages: Tensor | None, *, first: bool
) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor], Tensor]:
    """The sum of log-ratios; sums, maxima and logarithms of sums over the sequences that have response
    tokens."""
    log_ratio, tokens = seen.log_ratio, seen.count
    none = host_numbers((-math.inf,) * 3, log_ratio)
    if not first or not tokens.numel():
        zeros = tokens.new_zeros(6)
        return zeros[:1], (zeros[1:],), (none,), none[:2].clone()
    there = tokens > 0
    table = torch.stack([log_ratio, tokens, there, seen.keep])
    sums = torch.mv(table, table[2])
    multiples = log_ratio * host_numbers(((2,), (1,), (-1,)), log_ratio)
    candidates = torch.where(there, multiples, -torch.inf)
    highest, log_sums = candidates[1:].amax(1), candidates[:2].logsumexp(1)
    aged, oldest = (host_numbers((0, 0), log_ratio), none[:1]) if ages is None else _aged(there, ages)
    return sums[:1], (sums[1:], aged), (highest, oldest), log_sums


def _aged(there: Tensor, ages: Tensor) -> tuple[Tensor, Tensor]:
    """[2] how many sequences have an age and the sum of their ages; [1] the largest."""
    known = there & ~ages.isnan()
    ages = torch.where(known, ages.double(), -torch.inf)
    return torch.stack([known.sum(), torch.where(known, ages, 0).sum()]), ages.amax()[None]
