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

from slime_ext.analysis.detector_statistics import RolloutSummary
from slime_ext.analysis.diagnosis import Diagnosis
from slime_ext.analysis.findings.detector import FEW, Detected, detector, factor, nats
from slime_ext.analysis.findings.log_probs import SPOILT
from slime_ext.analysis.findings.sampling import OTHER_POLICY
from slime_ext.analysis.findings.turns import prefix_mismatch

BEFORE = (*SPOILT, *OTHER_POLICY, prefix_mismatch)
FEWEST, ROLLOUTS = 100, 6  # tokens of a rollout; rollouts
ABOVE, TIMES, MATTERS = 1.4, 3.0, 0.01  # of mean |l| over that before the onset; nats at the end
RISES, STILL = 1.35, 1.1  # mean |l| of the last third since the onset over that of the first, of the middle
ADVANCES = 0.8  # share of the rollouts with newer weights than the one before
SAME = 0.35  # of the way of the trainer, what a sampler that did not move may seem to have moved
NO_MOVE = 2.0  # times the distance at the begin, likewise


class Growth(NamedTuple):
    """Mean |l| before an onset, over the last rollouts, and the rollouts since the onset."""

    before: float
    late: float
    since: Sequence[RolloutSummary]


def _rollouts(d: Diagnosis) -> list[RolloutSummary]:
    return [s for s in d.statistics.rollouts if s.tokens >= FEWEST]


def _enough(d: Diagnosis) -> str:
    return "" if len(_rollouts(d)) >= ROLLOUTS else f"{ROLLOUTS} rollouts of {FEWEST} tokens"


def _with_versions(d: Diagnosis) -> str:
    return _enough(d) or (
        "" if any(s.version >= 0 for s in _rollouts(d)) else "weight versions of the samples"
    )


def _with_first_policy(d: Diagnosis) -> str:
    known = all(s.moved is not None for s in _rollouts(d))
    lacks = "log-probs of the first policy (slime: ref_log_probs, with --use-kl-loss or --kl-coef)"
    return _with_versions(d) or ("" if known else lacks)


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
    return bool(newer) and fmean(newer) >= ADVANCES


def _from_the_first_push(rollouts: Sequence[RolloutSummary]) -> Growth | None:
    """The growth of a run whose versions advance, if it began with the first push that the run shows."""
    found = growth(rollouts) if _advances(rollouts) else None
    return found if found and len(found.since) >= len(rollouts) - 2 else None


def _pushed(rollouts: Sequence[RolloutSummary]) -> tuple[float, float] | None:
    """How far sampler and trainer are from the first policy over the last third of the run; None where the
    dumps do not tell."""
    late = rollouts[-max(len(rollouts) // 3, 1) :]
    if any(s.moved is None or s.pushed is None for s in late):
        return None
    return fmean(s.pushed for s in late), fmean(s.moved for s in late)


def _is_still(pushed: float, moved: float, before: float) -> bool:
    return pushed <= max(SAME * moved, NO_MOVE * before) and pushed < moved


@detector(
    "error",
    after=BEFORE,
    needs=_with_versions,
    threshold=(
        "3 times the distance of the first rollout at the end, rising by 35% over the run, from the first "
        "push on"
    ),
    ruled_out=(
        "A lag of weights: its distance stops growing after as many rollouts as it lags, or falls with "
        "each push."
    ),
)
def frozen_sampler(d: Diagnosis) -> Detected | None:
    """Finds weight versions that advance while the distance grows from the first push on, as the trainer
    moves away from the first policy."""
    rollouts = _rollouts(d)
    found, way = _from_the_first_push(rollouts), _pushed(rollouts)
    if found is None or (way and not _is_still(*way, found.before)):
        return None
    title = "The sampler still has its first weights: pushes advance its version and change nothing."
    told = f"The sampler is {nats(way[0])} from the first policy, the trainer {nats(way[1])}. " if way else ""
    if not way:
        title = "Weights do not reach the sampler: the distance grows from the first push on."
    return Detected(
        title=title,
        evidence=(
            f"{told}Mean |log-ratio| {nats(found.before)} before the first push, {nats(found.late)} at the "
            f"end ({factor(found.late / max(found.before, 1e-12))}), while the versions went from "
            f"{rollouts[0].version} to {rollouts[-1].version}."
        ),
        fix=(
            "Compare a checksum of a trained weight on both sides after a push. Usual causes: a LoRA "
            "adapter that is trained and never sent (the engine lists none), a push of the base weights, "
            "names that the engine does not know and skips. Whether all or a part never arrives shows "
            "with ref_log_probs in the dump (--use-kl-loss with coefficient 0)."
        ),
        rollouts=tuple(s.rollout_id for s in found.since),
    )


@detector(
    "error",
    after=(*BEFORE, frozen_sampler),
    needs=_with_first_policy,
    threshold=(
        "the growth of frozen_sampler, by a sampler that is 35% as far from the first policy as the trainer"
    ),
    ruled_out=(
        "A sampler that nothing reaches: it would still be at the first policy. A lag of weights: it "
        "stops growing."
    ),
)
def partial_push(d: Diagnosis) -> Detected | None:
    """Finds a distance that grows from the first push on, by a sampler that moves away from the first policy
    too."""
    rollouts = _rollouts(d)
    found, way = _from_the_first_push(rollouts), _pushed(rollouts)
    if found is None or way is None:
        return None
    return Detected(
        title="A part of the weights does not reach the sampler.",
        evidence=(
            f"Sampler and trainer both move away from the first policy ({nats(way[0])} and "
            f"{nats(way[1])}), and yet apart: mean |log-ratio| {nats(found.before)} before the first push, "
            f"{nats(found.late)} at the end ({factor(found.late / max(found.before, 1e-12))})."
        ),
        fix=(
            "Compare names and checksums of all weights after a push: an adapter, one layer or pipeline "
            "stage, embeddings or a tied head, experts of another rank, a norm or bias that has another "
            "name in the engine. Layer outputs of both sides (layers/trainer, layers/sampler) name the "
            "layer."
        ),
        rollouts=tuple(s.rollout_id for s in found.since),
    )


@detector(
    "warning",
    after=(*BEFORE, frozen_sampler, partial_push),
    needs=_enough,
    threshold=(
        "3 times the distance before the onset at the end, every rollout since then 40% above it, and "
        "still rising"
    ),
    ruled_out=(
        "A lag of weights or a quantised engine: neither grows. A few odd tokens: they do not hold the sum."
    ),
)
def growing_mismatch(d: Diagnosis) -> Detected | None:
    """Finds the rollout from which on mean |l| grows and does not come back."""
    rollouts = _rollouts(d)
    found = growth(rollouts)
    if found is None or len(found.since) >= len(rollouts) - 2:  # from the start on: a lag, or never pushed
        return None
    if median(s.top_share for s in found.since) >= FEW:
        return None
    begin, longer = found.since[0], fmean(s.length for s in found.since) / max(rollouts[0].length, 1.0)
    return Detected(
        title=f"The policies part more and more, from rollout {begin.rollout_id} on.",
        evidence=(
            f"Mean |log-ratio| {nats(found.before)} before rollout {begin.rollout_id}, "
            f"{nats(begin.absolute)} in it, {nats(found.late)} at the end "
            f"({factor(found.late / max(found.before, 1e-12))})."
        ),
        fix=(
            f"Look at what happened at rollout {begin.rollout_id}: pushes that fail since then (does the "
            "engine confirm each?), an engine that was restarted, a change of flags. A growth without "
            "such a place: scales of a quantised engine that were fixed at the begin, weights that "
            "outgrow a narrow dtype."
        ),
        rollouts=tuple(s.rollout_id for s in found.since),
        ruled_out=(
            f"Longer responses: they are {longer:.2g} times as long as in the first rollout. A lag of "
            "weights or a quantised engine: neither grows."
        ),
    )


PUSHES = (frozen_sampler, partial_push, growing_mismatch)
