"""Whether the trainer's log-probs fit those that the sampler recorded one or two tokens away better.

Over whole responses (a slice that is off by one), or from some place of a turn on (text tokenised again).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import tabulated, zeros

SHIFTS = (-2, -1, 1, 2)
CLOSER = 0.5  # a shift explains a response when it takes away half of the distance,
SURE = 3.0  # and that is this many standard errors
# A part of a turn: when it leaves so much, of this many tokens, by so many standard errors; and the tokens of
# the sample's first turn: when there are so many, and their own distance is this share of the shifted one.
LATER_CLOSER, LATER, LATER_SURE = 0.3, 6, 2.5
EARLIER, EARLIER_CLOSER = 4, 0.05
SHIFT_TOKENS = 50  # of which a shift is told whatever their sequences
FAR = 0.1  # nats, mean |l| of a turn


def _ends(shift: int) -> tuple[slice, slice]:
    early, late = slice(None, -abs(shift)), slice(abs(shift), None)
    return (early, late) if shift > 0 else (late, early)


def shifted_sums(part: DumpedRollout, shift: int) -> tuple[Tensor, Tensor]:
    """[4, S] sums over tokens t whose place and the one ``shift`` tokens away are both in the sequence: their
    number, |proximal_t - behavior_(t + shift)|, |l| at t and |l| at t + shift; and whether the shift explains
    each sequence, [S] bool: the first distance is significantly below each of the others."""
    here, there = _ends(shift)
    ids, finite, sizes = part.segments.ids, part.finite, part.log_ratio.abs()
    both = (finite[here] & finite[there] & (ids[here] == ids[there])).to(torch.uint8).float()
    distance = (part.compared(part.proximal)[here] - part.compared(part.behavior)[there]).abs()
    rows = torch.zeros(4, part.size)
    for row, values in zip(rows[:, here], (1, distance, sizes[here], sizes[there]), strict=True):
        torch.mul(both, values, out=row)
    sums = part.segments.local_sums(rows)
    is_explained = (sums[1] < CLOSER * sums[2:]).all(0)
    if is_explained.any():
        squares = part.segments.local_sums((rows[2:] - rows[1]).square())
        is_explained &= (sums[2:] - sums[1] >= SURE * squares.sqrt()).all(0)
    return sums, is_explained


def explains(sums: Tensor) -> bool:
    """Whether a shift explains tokens, from the four sums of ``shifted_sums`` over them."""
    count, distance, *others = sums.tolist()
    return count >= SHIFT_TOKENS and distance < CLOSER * min(others)


def aligned(part: DumpedRollout, shifts: Tensor) -> DumpedRollout:
    """The part with the sampler's log-probs of sample s taken from ``shifts[s]`` tokens away, NaN beyond its
    ends.

    Args:
        shifts: [S] int64, 0 for none.
    """
    ids, own = part.segments.ids.long(), torch.arange(part.size)
    places = own + shifts[ids]
    inside = (places >= 0) & (places < part.size)
    places = places.clamp(0, max(part.size - 1, 0))
    inside &= ids[places] == ids
    return replace(part, behavior=torch.where(inside, part.behavior[places], torch.nan))


def moved_turns(part: DumpedRollout) -> int:
    """In how many turns a later part fits log-probs a few places away, and an earlier one its own."""
    if not part.size:
        return 0
    turns = part.segments.turn_ids
    count, distance = tabulated(turns, part.columns[:2], int(turns[-1]) + 1).unbind(1)
    if not (distance > FAR * count).any():  # most never are, and to look takes time
        return 0
    return max(_moved(part, shift) for shift in SHIFTS)


def _moved(part: DumpedRollout, shift: int) -> int:
    """In how many turns the trainer's log-probs fit those of the sampler ``shift`` places away from some
    token on, significantly better than their own, and their own before it in the same sample."""
    count, turns = int(part.segments.turn_ids[-1]) + 1, part.segments.turn_ids
    here, there = _ends(shift)
    both = part.finite[here] & part.finite[there] & (turns[here] == turns[there])
    own = part.log_ratio.double().abs()[here][both]
    moved = (part.proximal[here][both].double() - part.behavior[there][both]).abs()
    turn, sample = turns[here][both], part.segments.ids[here][both].long()
    if not len(own):
        return 0
    gain = own - moved
    before = gain.cumsum(0) - gain  # over all tokens ahead
    lowest = torch.full((count,), torch.inf, dtype=torch.float64).scatter_reduce(0, turn, before, "amin")
    at = torch.arange(len(gain))
    is_best = before <= lowest[turn]
    place = torch.full((count,), len(gain)).scatter_reduce(0, turn[is_best], at[is_best], "amin")
    is_late = at >= place[turn]
    columns = torch.stack([torch.ones_like(own), own, moved, gain.square()])
    n, distance, closer, square = tabulated(turn[is_late], columns[:, is_late], count).unbind(1)
    fits = (
        (n >= LATER) & (closer < LATER_CLOSER * distance) & (distance - closer >= LATER_SURE * square.sqrt())
    )
    first = torch.full((part.count,), count).scatter_reduce(0, sample, turn.long(), "amin")
    of_first = columns * (turn == first[sample])  # later turns before this one may be moved as well
    sums = torch.cat([zeros(4, 1), of_first.cumsum(1)], 1)
    begin = torch.full((part.count,), len(gain)).scatter_reduce(0, sample, at, "amin")
    of_turn = torch.zeros(count, dtype=torch.int64).scatter(0, turn, sample)
    earlier = sums[:, place.clamp(max=len(gain))] - sums[:, begin[of_turn]]
    return int((fits & (earlier[0] >= EARLIER) & (earlier[1] < EARLIER_CLOSER * earlier[2])).sum())
