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
from slime_ext.tools.analysis.tables import run_begins

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
    ids, finite, sizes = (x.numpy() for x in (part.segments.ids, part.finite, part.columns[1]))
    both = finite[here] & finite[there] & (ids[here] == ids[there])
    proximal, behavior = (part.compared(side).numpy() for side in (part.proximal, part.behavior))
    table = numpy.zeros((4, part.size))
    beyond = numpy.flatnonzero(~both)  # few, so setting them to 0 takes little time
    distance = numpy.abs(proximal[here] - behavior[there])
    for row, values in zip(table, (1.0, distance, sizes[here], sizes[there]), strict=True):
        row[here] = values
        row[here][beyond] = 0
    rows = torch.from_numpy(table).unbind()
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
    here, there = _ends(shift)
    turns, finite = part.segments.turn_ids.numpy(), part.finite.numpy()
    at = numpy.flatnonzero(finite[here] & finite[there] & (turns[here] == turns[there]))
    if not len(at):
        return 0
    turn = turns[here][at]
    in_place = numpy.abs(part.log_ratio.numpy()[here][at].astype(float))
    shifted = numpy.abs(part.proximal.numpy()[here][at].astype(float) - part.behavior.numpy()[there][at])
    gain = in_place - shifted
    before = gain.cumsum() - gain  # over all earlier tokens
    begins = run_begins(torch.from_numpy(turn)).numpy()
    ends = numpy.append(begins[1:], len(at))
    lowest = numpy.minimum.reduceat(before, begins)
    best = numpy.flatnonzero(before <= lowest.repeat(ends - begins))
    place = best[best.searchsorted(begins)]  # where the later part begins, the first of equally good ones
    long = numpy.flatnonzero(ends - place >= LATER)
    if not len(long):
        return 0
    rows = numpy.stack([numpy.ones_like(gain), in_place, shifted, gain * gain])
    sums = numpy.concatenate([numpy.zeros((4, 1)), rows.cumsum(1)], 1)
    _, distance, closer, square = _between(rows, place[long], ends[long])
    is_shifted = (closer < LATER_CLOSER * distance) & (distance - closer >= LATER_SURE * numpy.sqrt(square))
    # Only the sample's first turn says whether it fits without a shift, because later turns may be shifted.
    sample = part.segments.ids.numpy()[here][at[begins]]
    first = sample.searchsorted(sample[long])
    earlier = sums[:, numpy.minimum(place[long], ends[first])] - sums[:, begins[first]]
    return int((is_shifted & (earlier[0] >= EARLIER) & (earlier[1] < EARLIER_CLOSER * earlier[2])).sum())


def _between(rows: numpy.ndarray, begins: numpy.ndarray, ends: numpy.ndarray) -> numpy.ndarray:
    """Returns the sums of K rows over stretches, [K, stretches], none of which is empty."""
    edges = numpy.stack([begins, ends], 1).ravel()
    inside = edges[:-1] if ends[-1] == rows.shape[1] else edges
    return numpy.add.reduceat(rows, inside, 1)[:, ::2]
