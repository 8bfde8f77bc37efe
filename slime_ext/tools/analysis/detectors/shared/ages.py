"""Decides whether old weights explain the distance between the policies.

Several causes look like old weights, so their detectors ask this first. In rollout 0 the sampler's weights
are known to be the trainer's. Later, a version is old if it sampled an earlier rollout, or if the dump says
that it is behind the trainer's. A version that appears for the first time may be as old as an asynchronous
run allows.
"""

from __future__ import annotations

import math
from enum import Enum, auto
from typing import NamedTuple

from slime_ext.tools.analysis.detectors.shared.detector import Untold
from slime_ext.tools.analysis.detectors.shared.explained import AGREES
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.versions import VersionMeans, VersionSums, since_seen

FEWEST = 100  # tokens
ALIKE = 0.5  # share of the distance of all tokens that fresh ones have, if the cause acts on every token
MOST = 0.5  # share of the tokens that are known to come from old weights
MATTERS = 2e-3  # nats of k3 that old weights must make; a harmless lag of one rollout makes 1.5e-3
TIMES = 3.0  # times the k3 of fresh weights
SURE, CERTAIN = 2.0, 1.5  # standard errors to subtract; times the k3 of fresh weights, after that


class Lag(Enum):
    """The verdict on old weights as the cause of a distance."""

    RULED_OUT = auto()  # tokens from fresh weights are as far off
    EXPLAINS = auto()  # they are not, or most tokens are known to come from old weights
    UNKNOWN = auto()  # too few tokens are known to come from fresh or from old weights


UNTOLD = Untold(
    "which weights sampled",
    "analyse rollout 0 as well, where sampler and trainer have the same weights, and record weight versions "
    "(--custom-rollout-log-function-path slime_ext.host.log_rollout, or a patch)",
)


class Apart(NamedTuple):
    """Tokens from fresh weights and from old weights; the latter are several times as far off."""

    fresh: VersionMeans
    stale: VersionMeans
    sums: list[VersionSums]  # of the old versions


def older_are_far(d: Diagnosis) -> Apart | None:
    """Returns both kinds of tokens, if those from old weights are several times as far off.

    None if they are not, beyond sampling noise, or if one kind is missing.
    """
    return _apart(*fresh_and_stale(d.versions))


def pushes_arrive(d: Diagnosis) -> bool:
    """Returns whether the newest weights agree in rollouts in which older weights are far off.

    Weights that never arrive leave the newest version as far off as the others.
    """
    fresh, stale = fresh_and_stale(d.versions)
    with_stale = {v.rollout_id for v in stale}
    apart = _apart([v for v in fresh if v.rollout_id in with_stale], stale)
    return apart is not None and apart.fresh.k3 <= AGREES


def _apart(fresh_sums: list[VersionSums], stale_sums: list[VersionSums]) -> Apart | None:
    fresh, stale = VersionMeans.of(fresh_sums), VersionMeans.of(stale_sums)
    if min(fresh.count, stale.count) < FEWEST or stale.k3 < max(MATTERS, TIMES * fresh.k3):
        return None
    by_chance = math.exp(-SURE * math.hypot(fresh.relative_error, stale.relative_error))
    return Apart(fresh, stale, stale_sums) if stale.k3 * by_chance >= CERTAIN * fresh.k3 else None


def starts_near(d: Diagnosis) -> bool | None:
    """Returns whether rollout 0, where both sides have the same weights, is much nearer than the run.

    None if the dump lacks it.
    """
    first = d.rollouts[:1]
    if not first or first[0].rollout_id != 0 or first[0].tokens < FEWEST:
        return None
    return first[0].absolute < ALIKE * (d.sums.mean_absolute or 0.0)


def lag(d: Diagnosis) -> Lag:
    """Returns whether old weights cause the mean |l| of the run."""
    mean = d.sums.mean_absolute or 0.0
    is_later = starts_near(d)
    if is_later is not None:
        return Lag.EXPLAINS if is_later else Lag.RULED_OUT
    fresh, stale = map(VersionMeans.of, fresh_and_stale(d.versions))
    if stale.count > MOST * sum(s.tokens for s in d.rollouts):
        return Lag.EXPLAINS
    if fresh.count >= FEWEST and fresh.absolute < ALIKE * mean:
        return Lag.EXPLAINS
    return Lag.UNKNOWN


def fresh_and_stale(versions: list[VersionSums]) -> tuple[list[VersionSums], list[VersionSums]]:
    """Splits the sums by version into those of fresh and of old weights.

    A version is old if the dump says that it is behind the trainer's, if it sampled an earlier rollout, or if
    it is not the newest of its rollout. It is fresh if it is the newest of rollout 0, or appears for the
    first time after another rollout. Nothing is known of the newest version in the first rollout of a part
    of a run.
    """
    seen, newest = since_seen(versions), {v.rollout_id: v.version for v in sorted(versions)}
    stale = [v for v in versions if v.age > 0 or seen.get(v, 0) > 0 or v.version < newest[v.rollout_id]]
    first = min(newest, default=0)
    is_old = set(stale)
    return [v for v in versions if v not in is_old and (v.rollout_id > first or not first)], stale
