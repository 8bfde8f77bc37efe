"""Weights that never arrive: the sampler's versions advance, the policies part all the same.

With theta_0 the weights at the run's begin, a sampler that nothing reaches is at theta_0 while the trainer
moves on: the distance is that to the first policy, and grows as the trainer moves. A sampler that a part of
the weights reaches moves too, and the distance grows all the same. A lag of bounded length does not grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from slime_ext.tools.analysis.findings.ages import fresh_and_stale
from slime_ext.tools.analysis.findings.detector import FEW, Figures, need
from slime_ext.tools.analysis.measures.detector_statistics import RolloutSummary
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

FEWEST, ROLLOUTS = 100, 6  # tokens of a rollout; rollouts
ABOVE, TIMES, MATTERS = 1.3, 3.0, 0.01  # of mean |l| over that before the onset; nats at the end
RISES, STILL = 1.35, 1.1  # mean |l| of the last third since the onset over that of the first, of the middle
ARRIVES = 0.9  # of the way of the trainer; a sampler that went further has all of the weights, and noise
ADVANCES = 0.8  # share of the rollouts with newer weights than the one before; all of the first ones
BEGINS = 3  # rollouts: a lag begins with weights that sample two of them
SAME = 0.35  # of the way of the trainer, what a sampler that did not move may seem to have moved
NO_MOVE = 2.0  # times the distance at the begin, likewise
# Of a sampler that stays: the trainer's way over its own, and the distance over that at the begin.
LEFT = 2.0
UNTOLD = (
    "how far each side is from the first policy: record ref_log_probs (slime: --use-kl-loss with "
    "coefficient 0)"
)


class Growth(NamedTuple):
    """Mean |l| before an onset, over the last rollouts, and the rollouts since the onset."""

    before: float
    late: float
    since: Sequence[RolloutSummary]

    def figures(self) -> Figures:
        return {
            "before": self.before,
            "late": self.late,
            "rollouts": tuple(s.rollout_id for s in self.since),
        }


def frozen_sampler(d: Diagnosis) -> Figures | None:
    """Finds weight versions that advance while the distance grows from the first push on, as the trainer
    moves away from the first policy."""
    rollouts = _with_versions(d)
    found, way = _from_the_first_push(rollouts), _pushed(rollouts)
    if way:
        found = _left_behind(rollouts, way)
    if found is None:
        return None
    figures = {**found.figures(), "way": way, "first": rollouts[0].version, "last": rollouts[-1].version}
    return figures if way else figures | {"or_else": ("partial_push", "growing_mismatch"), "untold": UNTOLD}


def partial_push(d: Diagnosis) -> Figures | None:
    """Finds a distance that grows from the first push on, by a sampler that moves away from the first policy
    too."""
    rollouts = _with_versions(d)
    lacks = "log-probs of the first policy (slime: ref_log_probs, with --use-kl-loss or --kl-coef)"
    need(all(s.moved is not None for s in rollouts), lacks)
    found, way = growth(rollouts) if _advances(rollouts) else None, _pushed(rollouts)
    if found is None or way is None or way[0] >= ARRIVES * way[1]:
        return None
    return {**found.figures(), "way": way}


def growing_mismatch(d: Diagnosis) -> Figures | None:
    """Finds the rollout from which on mean |l| grows and does not come back."""
    rollouts = _enough(d)
    found = growth(rollouts)
    way = _pushed(rollouts)
    arrives = way is not None and way[0] >= ARRIVES * way[1]
    if found is None or (len(found.since) >= len(rollouts) - 2 and not arrives):  # a lag, or never pushed
        return None
    since, stale = {s.rollout_id for s in found.since}, fresh_and_stale(d.statistics.versions)[1]
    if 2 * sum(v.count for v in stale if v.rollout_id in since) > sum(s.tokens for s in found.since):
        return None
    if median(s.top_share for s in found.since) >= FEW:
        return None
    longer = fmean(s.length for s in found.since) / max(rollouts[0].length, 1.0)
    return {**found.figures(), "begin": found.since[0], "longer": longer}


def _enough(d: Diagnosis) -> list[RolloutSummary]:
    """The rollouts that are large enough, with mean |l| of tokens as certain as those of the run."""
    evened = zip(d.statistics.rollouts, d.statistics.evened(), strict=True)
    rollouts = [s._replace(absolute=absolute) for s, absolute in evened if s.tokens >= FEWEST]
    need(len(rollouts) >= ROLLOUTS, f"{ROLLOUTS} rollouts of {FEWEST} tokens")
    return rollouts


def _with_versions(d: Diagnosis) -> list[RolloutSummary]:
    rollouts = _enough(d)
    need(any(s.version >= 0 for s in rollouts), "weight versions of the samples")
    return rollouts


def growth(rollouts: Sequence[RolloutSummary]) -> Growth | None:
    """Where mean |l| began to grow and never came back, if it did.

    The onset is the first rollout from which on every mean |l| is ABOVE times the median before; the growth
    is one if the end is TIMES that median, and the last third since the onset RISES times the first third and
    STILL times the middle one.
    """
    values = [s.absolute for s in rollouts]
    for onset in range(1, len(values) - 2):
        before, since = median(values[:onset]), values[onset:]
        third = max(len(since) // 3, 1)
        first, middle, late = (fmean(part) for part in (since[:third], since[third:-third], since[-third:]))
        least = max(TIMES * before, MATTERS, RISES * first, STILL * middle)
        if min(since) >= ABOVE * before and late >= least:
            return Growth(before, late, rollouts[onset:])
    return None


def _advances(rollouts: Sequence[RolloutSummary]) -> bool:
    """Whether nearly every rollout has newer weights than the one before, as the engine tells it."""
    newer = [b.version > a.version >= 0 for a, b in pairwise(rollouts)]
    return fmean(newer) >= ADVANCES and all(newer[: BEGINS - 1])


def _from_the_first_push(rollouts: Sequence[RolloutSummary]) -> Growth | None:
    """The growth of a run whose versions advance, if it began with the first push that the run shows."""
    found = growth(rollouts) if _advances(rollouts) else None
    return found if found and len(found.since) >= len(rollouts) - 2 else None


def _left_behind(rollouts: Sequence[RolloutSummary], way: tuple[float, float]) -> Growth | None:
    """The distance of a sampler that is still at the first policy, of which the trainer has left."""
    before, late = rollouts[0].absolute, fmean(s.absolute for s in rollouts[-len(rollouts) // 3 :])
    pushed, moved = way
    is_still = pushed <= max(SAME * moved, NO_MOVE * before) and moved >= LEFT * pushed
    if not is_still or not _advances(rollouts) or late < max(LEFT * before, MATTERS):
        return None
    return Growth(before, late, rollouts[1:])


def _pushed(rollouts: Sequence[RolloutSummary]) -> tuple[float, float] | None:
    """How far sampler and trainer are from the first policy over the last third of the run; None where the
    dumps do not tell."""
    late = rollouts[-max(len(rollouts) // 3, 1) :]
    if any(s.moved is None or s.pushed is None for s in late):
        return None
    return fmean(s.pushed for s in late), fmean(s.moved for s in late)
