"""Tests whether weights never arrive: the sampler's versions advance, but the policies move apart.

Let theta_0 be the weights at the start of the run. A sampler that no weights reach stays at theta_0, so the
distance is that of the trainer to theta_0, and grows as the trainer moves. A sampler that only a part of the
weights reaches moves as well, and the distance still grows. A lag of bounded length does not grow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median, stdev
from typing import NamedTuple

from slime_ext.tools.analysis.detectors.shared.detector import Figures, need
from slime_ext.tools.analysis.detectors.shared.explained import K3, explained
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.rollouts import RolloutSummary, equally_certain, mean_k3

FEWEST, ROLLOUTS = 100, 6  # tokens of a rollout; rollouts
ABOVE, TIMES, MATTERS = 1.3, 3.0, 0.01  # times mean |l| before the onset: always, at the end; nats at the end
SURE, CERTAIN = 2.0, 1.5  # standard errors to subtract; times mean |l| before the onset, after that
RISES, STILL = 1.35, 1.1  # mean |l| of the last third since the onset, over the first third; over the middle
ARRIVES = 0.9  # share of the trainer's distance from theta_0 from which the sampler has all weights
# Share of the sampler's way by which it is nearer to the trainer, if it has a part of the update: 0.8 and
# more in the runs of benchmarks/faults, and at most 0.52 if it has the update in the prompt's cache alone.
ALONG = 2 / 3
ADVANCES = 0.8  # share of the rollouts with a newer version than the one before
BEGINS = 3  # first rollouts, all with newer versions; at the start of a lag, one version samples two of them


class Growth(NamedTuple):
    """Mean |l| before an onset and at the end, the rollouts since the onset, and those before."""

    before: float
    late: float
    since: Sequence[RolloutSummary]
    earlier: Sequence[RolloutSummary]

    def figures(self) -> Figures:
        # Anything else that began then is in the same rollouts, so the share is the most that this explains.
        explains = explained(K3.of_rollouts(self.since), K3.of_rollouts(self.earlier))
        return {
            "before": self.before,
            "late": self.late,
            "rollouts": tuple(s.rollout_id for s in self.since),
            "explains": explains.of_any(mean_k3([*self.earlier, *self.since])),
        }


def enough(d: Diagnosis) -> list[RolloutSummary]:
    """Returns the rollouts with enough tokens; their mean |l| is adjusted to the run's mix of certainty."""
    both = zip(d.rollouts, equally_certain(d.rollouts), strict=True)
    rollouts = [s._replace(absolute=absolute) for s, absolute in both if s.tokens >= FEWEST]
    need(len(rollouts) >= ROLLOUTS, f"{ROLLOUTS} rollouts of {FEWEST} tokens")
    return rollouts


def with_versions(d: Diagnosis) -> list[RolloutSummary]:
    rollouts = enough(d)
    need(any(s.version >= 0 for s in rollouts), "weight versions of the samples")
    return rollouts


def growth(rollouts: Sequence[RolloutSummary]) -> Growth | None:
    """Returns the growth of mean |l| since the onset from which it never fell back, or None.

    The onset is the first rollout from which on every mean |l| is ABOVE times the median before. The end must
    be TIMES that median, and the last third since the onset must be RISES times the first third and STILL
    times the middle one. After subtracting SURE standard errors, it must still be CERTAIN times that median
    and above the first third.
    """
    values = [s.absolute for s in rollouts]
    for onset in range(1, len(values) - 2):
        before, since = median(values[:onset]), values[onset:]
        third = max(len(since) // 3, 1)
        first, middle, late = (fmean(part) for part in (since[:third], since[third:-third], since[-third:]))
        least = max(TIMES * before, MATTERS, RISES * first, STILL * middle)
        if min(since) >= ABOVE * before and late >= least:
            first_error, late_error = (_error(part) for part in (rollouts[onset:][:third], rollouts[-third:]))
            by_chance = math.exp(SURE * math.hypot(late_error, _error(rollouts[:onset])))
            still_by_chance = math.exp(SURE * math.hypot(late_error, first_error))
            if late >= CERTAIN * before * by_chance and late >= first * still_by_chance:
                return Growth(before, late, rollouts[onset:], rollouts[:onset])
    return None


def _error(rollouts: Sequence[RolloutSummary]) -> float:
    """Returns the standard error of the logarithm of the mean over rollouts of mean |l|."""
    total = math.sqrt(sum((s.absolute_error * s.absolute) ** 2 for s in rollouts))
    return total / max(sum(s.absolute for s in rollouts), 1e-30)


def advances(rollouts: Sequence[RolloutSummary]) -> bool:
    """Returns whether nearly every rollout has a newer weight version than the one before."""
    newer = [b.version > a.version >= 0 for a, b in pairwise(rollouts)]
    return fmean(newer) >= ADVANCES and all(newer[: BEGINS - 1])


def ways(rollouts: Sequence[RolloutSummary]) -> tuple[float, float] | None:
    """Returns how far both sides are from the first policy, late in the run.

    None if the dumps do not tell.
    """
    late = _late(rollouts)
    if any(s.moved is None or s.pushed is None for s in late):
        return None
    return fmean(s.pushed for s in late), fmean(s.moved for s in late)


def moves_along(d: Diagnosis, way: tuple[float, float]) -> bool:
    """Returns whether the sampler's way from the first policy brings it as much nearer to the trainer.

    A part of the trainer's update lies on the trainer's way, so that the distances add up. Noise, or a cache
    of other weights, moves the sampler aside. No distance is adjusted to certainty here.
    """
    pushed, moved = way
    late = _late([s for s in d.rollouts if s.tokens >= FEWEST])
    return moved - fmean(s.absolute for s in late) >= ALONG * pushed


def spread_of_ways(rollouts: Sequence[RolloutSummary]) -> float:
    """Returns the standard error of the sampler's way over the trainer's, from late rollouts."""
    shares = [s.pushed / s.moved for s in _late(rollouts) if s.pushed is not None and s.moved]
    return stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else 0.0


def _late(rollouts: Sequence[RolloutSummary]) -> Sequence[RolloutSummary]:
    return rollouts[-max(len(rollouts) // 3, 1) :]
