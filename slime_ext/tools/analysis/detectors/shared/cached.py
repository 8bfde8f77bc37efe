"""Counts the samples whose prompt begins in the engine's prefix cache, rollout by rollout."""

from __future__ import annotations

from dataclasses import field
from typing import NamedTuple

from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout


class CachedRollout(NamedTuple):
    """The share of a rollout's samples with a cached prefix."""

    rollout_id: int
    share: float


class CachedShares(Measure):
    """The share of each rollout's samples with a cached prefix, where the dump has it."""

    rollouts: list[CachedRollout] = field(default_factory=list)

    def close(self, rollout: DumpedRollout) -> None:
        if rollout.cached is not None and rollout.count:
            share = sum(count > 0 for count in rollout.cached) / rollout.count
            self.rollouts.append(CachedRollout(rollout.rollout_id, share))
