"""Tests whether the trainer's log-probs fit better those that the sampler recorded one or two tokens away.

A shift may affect whole responses (a slice that is off by one), or a turn from some token on (text that was
tokenised again).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from slime_ext.tools.analysis.measures.measure import once_per_part
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import are_equal, tabulated, zeros

SHIFTS = (-2, -1, 1, 2)
# A shift explains a response if it leaves at most this share of the distance, by this many standard errors.
CLOSER, SURE = 0.5, 3.0
# A shift explains the later part of a turn if it leaves this share of the distance, over this many tokens, by
# this many standard errors. The earlier part must have this many tokens, and without the shift this share of
# the distance.
LATER_CLOSER, LATER, LATER_SURE = 0.3, 6, 2.5
EARLIER, EARLIER_CLOSER = 4, 0.05
SHIFT_TOKENS = 50  # tokens from which a shift can be told over all sequences
FAR = 0.1  # nats, mean |l| of a turn


def _ends(shift: int) -> tuple[slice, slice]:
    early, late = slice(None, -abs(shift)), slice(abs(shift), None)
    return (early, late) if shift > 0 else (late, early)


def shifted_sums(part: DumpedRollout, shift: int) -> tuple[Tensor, Tensor]:
    """Returns sums over tokens for a shift, [4, S], and whether it explains each sequence, [S] bool.

    The sums are over tokens t for which t + shift is in the same sequence: their number, |proximal_t -
    behavior_(t + shift)|, |l| at t and |l| at t + shift. The shift explains a sequence if the first distance
    is significantly below both others.
    """
    here, there = _ends(shift)
    ids, finite, sizes = part.segments.ids, part.finite, part.columns[1]
    both = finite[here] & finite[there] & are_equal(ids[here], ids[there])
    distance = (part.compared(part.proximal)[here] - part.compared(part.behavior)[there]).abs()
    rows = [torch.zeros(part.size, dtype=torch.float64) for _ in range(4)]
    beyond = torch.from_numpy(numpy.flatnonzero(~both.numpy()))  # few, so setting them to 0 takes little time
    for row, values in zip(rows, (torch.ones(()), distance, sizes[here], sizes[there]), strict=True):
        row[here].copy_(values).index_fill_(0, beyond, 0)
    sums = part.sums(rows)
    is_explained = (sums[1] < CLOSER * sums[2:]).all(0)
    if is_explained.any():
        distance, *others = (row.float() for row in rows[1:])
        squares = part.sums([(other - distance).square() for other in others])
        is_explained &= (sums[2:] - sums[1] >= SURE * squares.sqrt()).all(0)
    return sums, is_explained


class Shifted(NamedTuple):
    """The test of each shift on one part.

    Attributes:
        sums: [R, SHIFTS, 4], ``shifted_sums`` over all samples, of each joined rollout or of the part alone.
        explained: [SHIFTS, S] bool, the samples that a shift explains.
        shifts: [S] int64, how many tokens away the log-probs of each sample are; 0: no shift.
    """

    sums: Tensor
    explained: Tensor
    shifts: Tensor


@once_per_part
def shifts_of(part: DumpedRollout) -> Shifted:
    """Returns the test of each shift on a part."""
    tests = [shifted_sums(part, shift) for shift in SHIFTS]
    counts = [one.count for one in part.rollouts]
    by_rollout = [[s.sum(1) for s in of_samples.split(counts, 1)] for of_samples, _ in tests]
    sums = torch.stack([torch.stack(of_shift) for of_shift in by_rollout], 1)
    shifts = torch.zeros(part.count, dtype=torch.int64)
    for i, (shift, (_, is_explained)) in enumerate(zip(SHIFTS, tests, strict=True)):
        for of_all, of_rollout in zip(sums[:, i], shifts.split(counts), strict=True):
            if explains(of_all):
                of_rollout[:] = shift
        shifts[is_explained] = shift
    return Shifted(sums, torch.stack([is_explained for _, is_explained in tests]), shifts)


def explains(sums: Tensor) -> bool:
    """Returns whether a shift explains tokens, from the four sums of ``shifted_sums``."""
    count, distance, *others = sums.tolist()
    return count >= SHIFT_TOKENS and distance < CLOSER * min(others)


def aligned(part: DumpedRollout, shifts: Tensor) -> DumpedRollout:
    """Returns the part with each sample's behavior log-probs taken from some tokens away.

    They are NaN beyond the ends of the sample.

    Args:
        shifts: [S] int64, how many tokens away; 0: no shift.
    """
    ids, tokens = part.segments.ids.long(), torch.arange(part.size)
    places = tokens + shifts[ids]
    inside = (places >= 0) & (places < part.size)
    places = places.clamp(0, max(part.size - 1, 0))
    inside &= ids[places] == ids
    return replace(part, behavior=torch.where(inside, part.behavior[places], torch.nan))


def moved_turns(part: DumpedRollout) -> int:
    """Returns in how many turns only a later part fits log-probs a few tokens away."""
    return max(_moved(part, shift) for shift in SHIFTS)


def _moved(part: DumpedRollout, shift: int) -> int:
    """Returns in how many turns a shift explains only the later part.

    From some token on, the trainer's log-probs fit those ``shift`` tokens away significantly better. Before
    it, in the same sample, they fit without a shift.
    """
    count, turns = int(part.segments.turn_ids[-1]) + 1, part.segments.turn_ids
    here, there = _ends(shift)
    both = part.finite[here] & part.finite[there] & (turns[here] == turns[there])
    in_place = part.log_ratio.double().abs()[here][both]
    shifted = (part.proximal[here][both].double() - part.behavior[there][both]).abs()
    turn, sample = turns[here][both], part.segments.ids[here][both].long()
    if not len(in_place):
        return 0
    gain = in_place - shifted
    before = gain.cumsum(0) - gain  # over all earlier tokens
    lowest = torch.full((count,), torch.inf, dtype=torch.float64).scatter_reduce(0, turn, before, "amin")
    at = torch.arange(len(gain))
    is_best = before <= lowest[turn]
    place = torch.full((count,), len(gain)).scatter_reduce(0, turn[is_best], at[is_best], "amin")
    is_late = at >= place[turn]
    columns = torch.stack([torch.ones_like(in_place), in_place, shifted, gain.square()])
    n, distance, closer, square = tabulated(turn[is_late], columns[:, is_late], count).unbind(1)
    is_shifted = (
        (n >= LATER) & (closer < LATER_CLOSER * distance) & (distance - closer >= LATER_SURE * square.sqrt())
    )
    first = torch.full((part.count,), count).scatter_reduce(0, sample, turn.long(), "amin")
    of_first = columns * (turn == first[sample])  # because later turns may be shifted as well
    sums = torch.cat([zeros(4, 1), of_first.cumsum(1)], 1)
    begin = torch.full((part.count,), len(gain)).scatter_reduce(0, sample, at, "amin")
    of_turn = torch.zeros(count, dtype=torch.int64).scatter(0, turn, sample)
    earlier = sums[:, place.clamp(max=len(gain))] - sums[:, begin[of_turn]]
    return int((is_shifted & (earlier[0] >= EARLIER) & (earlier[1] < EARLIER_CLOSER * earlier[2])).sum())
