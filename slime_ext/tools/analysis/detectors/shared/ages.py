"""Whether old weights explain the distance between the policies, asked before any cause that looks like them.

The sampler's weights are known to be the trainer's in rollout 0 of a run; after it, a version that sampled an
earlier rollout is old, and so is one that the dump says is behind the trainer's. A version that is seen for
the first time may be as old as an asynchronous run lets it be.
"""

from __future__ import annotations

import math
from enum import Enum, auto
from typing import NamedTuple

from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.versions import VersionMeans, VersionSums, since_seen

FEWEST = 100  # tokens
ALIKE = 0.5  # of the distance of all tokens: a cause that acts on every token alike shows in fresh ones too
MOST = 0.5  # share of the tokens
MATTERS = 2e-3  # nats of k3 that old weights must make; a lag of one rollout that does no harm makes 1.5e-3
TIMES = 3.0  # as much as fresh ones
SURE, CERTAIN = 2.0, 1.5  # standard errors over samples, that far below; as much as fresh ones


class Lag(Enum):
    """What a dump says of old weights as the cause of a distance."""

    RULED_OUT = auto()  # tokens of fresh weights are as far off
    EXPLAINS = auto()  # fresh ones are not, or most tokens are known to be of old weights
    UNKNOWN = auto()  # no token is known to be of fresh weights, and none of old ones


UNTOLD = (
    "which weights sampled: analyse rollout 0 of the run too, where sampler and trainer have the same, and "
    "record weight versions (--custom-rollout-log-function-path slime_ext.host.log_rollout, or a patch)"
)


class Apart(NamedTuple):
    """Tokens of fresh weights and those of old weights, which are a multiple as far off."""

    fresh: VersionMeans
    stale: VersionMeans
    sums: list[VersionSums]  # of the old ones


def older_are_far(d: Diagnosis) -> Apart | None:
    """Whether tokens of old weights are a multiple as far off as those of fresh ones, beyond what the draw of
    the samples may do; None if not, or if one kind is missing."""
    fresh_sums, stale_sums = fresh_and_stale(d.statistics.versions)
    fresh, stale = VersionMeans.of(fresh_sums), VersionMeans.of(stale_sums)
    if min(fresh.count, stale.count) < FEWEST or stale.k3 < max(MATTERS, TIMES * fresh.k3):
        return None
    by_chance = math.exp(-SURE * math.hypot(fresh.wobble, stale.wobble))
    return Apart(fresh, stale, stale_sums) if stale.k3 * by_chance >= CERTAIN * fresh.k3 else None


def lag(d: Diagnosis) -> Lag:
    """What the dump says of old weights as the cause of the mean |l| of the run."""
    mean = d.sums.mean("absolute") or 0.0
    first = d.statistics.rollouts[:1]
    if first and first[0].rollout_id == 0 and first[0].tokens >= FEWEST:
        return Lag.RULED_OUT if first[0].absolute >= ALIKE * mean else Lag.EXPLAINS
    fresh, stale = map(VersionMeans.of, fresh_and_stale(d.statistics.versions))
    if stale.count > MOST * sum(s.tokens for s in d.statistics.rollouts):
        return Lag.EXPLAINS
    if fresh.count >= FEWEST and fresh.absolute < ALIKE * mean:
        return Lag.EXPLAINS
    return Lag.UNKNOWN


def fresh_and_stale(versions: list[VersionSums]) -> tuple[list[VersionSums], list[VersionSums]]:
    """The sums over tokens of weights that are new and over those of weights that are old, as far as versions
    tell.

    Old are those that the dump says are behind the trainer's, that had sampled an earlier rollout, or that
    are not the newest of their rollout. New is the newest version of rollout 0, and one that is seen for the
    first time after another. Of those in the first rollout of a part of a run nothing is known.
    """
    seen, newest = since_seen(versions), {v.rollout_id: v.version for v in sorted(versions)}
    stale = [v for v in versions if v.age > 0 or seen.get(v, 0) > 0 or v.version < newest[v.rollout_id]]
    first = min(newest, default=0)
    is_old = set(stale)
    return [v for v in versions if v not in is_old and (v.rollout_id > first or not first)], stale
