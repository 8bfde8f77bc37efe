"""Counts positions by the set of tokens that truncated sampling kept."""

from __future__ import annotations

from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import count_true

ZERO = 1e-3  # nats; a log-prob that is renormalised to a single token is closer to 0


class Kept(Measure):
    """Positions with a known kept set."""

    known: int = 0  # all of them
    outside: int = 0  # the sampled token is not in the set
    alone: int = 0  # the set is one token
    sampler: int = 0  # the set is one token, and the sampler's log-prob is 0
    trainer: int = 0  # the set is one token, and the trainer's log-prob is 0
    mass: float = 0.0  # sum of the ratio over known positions

    def add(self, part: DumpedRollout) -> None:
        if part.kept is None:
            return
        known = part.finite & part.kept.isfinite()
        alone = known & (part.kept.abs() == 1)
        self.known += count_true(known)
        self.outside += count_true(known & (part.kept < 0))
        self.alone += int(alone.sum())
        self.sampler += count_true(alone & (part.behavior > -ZERO))
        self.trainer += count_true(alone & (part.proximal > -ZERO))
        self.mass += float(part.log_ratio[known].double().clamp(max=2.0).exp().sum())
