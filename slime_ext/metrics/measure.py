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
from slime_ext.metrics.bins import Places, curve_sums, places_of, sums_by_place
from slime_ext.metrics.layout import FIRST, HIGHEST, LOG_SUMS, SHIFT, SIDE, Layout
from slime_ext.ops import arrays
from slime_ext.ops.codes import count_flags
from slime_ext.ops.grid import host_numbers
from slime_ext.ops.segments import Segments, as_numbers, is_traced
from slime_ext.ops.tally import count
from slime_ext.outcome import BLOCK

SIGNS = ((1,), (-1,))  # the smallest is the largest of the negated
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
    extremes, rows = (_traced if is_traced(outcome.log_ratio) else _filled)(tokens, outcome)
    kept, acted, curves = _counted(tokens, outcome, layout, rows)
    of_tokens = _totals(rows)
    log_ratio, per_sequence, highest, log_sums = _of_sequences(outcome.sequences, tokens.ages, first=first)
    clipped = acted[-1:] if surrogate_clipped is None else surrogate_clipped.sum(0, keepdim=True)
    sums = (kept, of_tokens[:3], log_ratio, of_tokens[3:], acted[:-1], clipped, *per_sequence)
    parts = [*sums, *_histogram(outcome.log_ratio), *curves, *extremes, *highest, log_sums]
    every = torch.cat([_joinable(part) for part in parts])
    return Measured(*every.split((every.numel() - len(HIGHEST) - len(LOG_SUMS), len(HIGHEST), len(LOG_SUMS))))


def _joinable(part: Tensor) -> Tensor:
    """In float64 where that had better be done before parts are joined: CUDA joins at once what has one
    dtype, and copies all else in turn."""
    return part if is_traced(part) or part.device.type == "cpu" else part.double()


def nothing(layout: Layout, device: torch.device | str = "cpu") -> Measured:
    """What no tokens add."""
    empty = torch.zeros(0, dtype=torch.float64, device=device)
    no = empty > 0
    outcome = Outcome(empty, no, no, empty, no, no.int(), Sequences(empty, empty, no))
    return measure(Tokens(Segments.whole([], no), empty, empty), outcome, layout)


def _traced(tokens: Tokens, outcome: Outcome) -> tuple[list[Tensor], list[Tensor]]:
    """``_filled`` where a compiler records, without a room."""
    log_ratio, dtype = outcome.log_ratio, outcome.log_ratio.dtype
    ends = [torch.where(outcome.finite, sign * log_ratio, -torch.inf).amax(0, True) for (sign,) in SIGNS]
    excess, weight = (x.clamp(max=LARGEST[dtype]) for x in (outcome.excess, outcome.weights.to(dtype)))
    behavior = torch.where(outcome.finite, tokens.behavior.to(dtype), 0)
    rows = [excess, weight, excess - log_ratio, behavior, excess.square(), weight.square()]
    return [*ends, outcome.weights.amax(0, True)], rows


def _filled(tokens: Tokens, outcome: Outcome) -> tuple[Sequence[Tensor], Tensor]:
    """Largest and smallest log-ratio, the latter negated, and largest weight, infinite for none; and what is
    summed over tokens, [T] or more each, in the outcome's room: excess, weight, k3, log behavior, and two
    squares."""
    log_ratio, weights, room = outcome.log_ratio, outcome.weights, outcome.room
    excess, weight, k3, behavior, _, _ = rows = room[:, : len(weights)]
    ends = _ends(outcome, rows[1:3])
    largest = weights.amax(0, True) if len(weights) else host_numbers((-math.inf,), room)
    excess.clamp_(max=LARGEST[room.dtype])
    torch.clamp(weights, max=LARGEST[room.dtype], out=weight)
    torch.sub(excess, log_ratio, out=k3)
    seen = tokens.behavior.detach().to(room.dtype)
    torch.where(outcome.finite, seen, log_ratio, out=behavior)  # which is 0 elsewhere
    torch.square(rows[:2], out=rows[4:])
    return (ends, largest), room


def _ends(outcome: Outcome, rows: Tensor) -> Tensor:
    """[2] the largest log-ratio, and the negated smallest; ``rows`` [2, T] is where to work. NaN counts on
    devices alone: elsewhere the hook has stopped at it."""
    log_ratio, finite = outcome.log_ratio, outcome.finite
    if arrays.is_array(log_ratio):
        return arrays.ends(torch.where(finite, log_ratio, host_numbers(math.nan, rows), out=rows[0]))
    torch.mul(log_ratio, host_numbers(SIGNS, rows), out=rows)
    torch.where(finite, rows, host_numbers(-math.inf, rows), out=rows)
    return rows.amax(1) if rows.numel() else host_numbers((-math.inf,) * 2, rows)


def _totals(rows: Sequence[Tensor]) -> Tensor:
    """[6] float64, the sum of each row."""
    if not isinstance(rows, Tensor):
        return torch.stack([row.sum(dtype=torch.float64) for row in rows])
    return rows.view(len(rows), rows.shape[1] // BLOCK, BLOCK).sum(2).sum(1, dtype=torch.float64)


def _counted(
    tokens: Tokens, outcome: Outcome, layout: Layout, rows: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """[2] finite and kept tokens; [F + 1] those that the layout's flags ask for, and 0; and the curves."""
    places = places_of(tokens, outcome.log_ratio.dtype) if layout.curves else None
    kept, acted = _flags(tokens, outcome, layout, places)
    if places is not None:
        kept, curves = sums_by_place(places, kept, rows)
        return kept, acted, curves
    return kept[0], acted, curve_sums(tokens, outcome, rows) if layout.curves else ()


def _flags(tokens: Tokens, outcome: Outcome, layout: Layout, places: Places | None) -> tuple[Tensor, Tensor]:
    """[bins, 2] finite and kept tokens; [F + 1] those that the layout's flags ask for, and 0."""
    mask, finite, keep, acted = tokens.segments.mask, outcome.finite, outcome.keep, outcome.acted
    queries = tuple(bits for _, bits in layout.flags)
    if not is_traced(acted):
        by = {} if places is None else {"place": places.index[0], "bins": places.bins}
        return count_flags(acted, mask, finite, keep, (*queries, 0), rejects=outcome.rejects, **by)
    carried = [((acted & bits) != 0) & mask for bits in queries]
    rows = [as_numbers(row, torch.float32).sum(dtype=torch.float64) for row in (finite, keep, *carried)]
    found = pad(torch.stack(rows), (0, 1))
    return found[None, :2], found[2:]


def _histogram(log_ratio: Tensor) -> list[Tensor]:
    """Tokens per bin of |l|, 16 per power of 2 from 2^-20 to 2^7 nats: BINS numbers in parts, those above 0
    first.

    A token without a finite log-prob has l = 0 and lies in no bin.
    """
    every = 1 << (31 - SHIFT)
    # The sign, too, is one of the bits.
    index = (log_ratio.float().view(torch.int32) >> SHIFT).add_(every)
    sides = _joinable(count(index, 2 * every)).view(2, every)
    beyond = sides[:, FIRST + SIDE :].sum(1, keepdim=True)
    below, above = sides[:, FIRST : FIRST + SIDE]
    return [above, beyond[1], below, beyond[0]]


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
