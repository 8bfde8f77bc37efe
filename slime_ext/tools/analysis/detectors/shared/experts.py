"""Counts the experts that both sides chose, and tells a mixture of experts from a dense model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor

from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import sum_of, zeros


@dataclass
class Routing(Measure):
    """The sums of ``routes``, ``experts`` and ``routing`` of ``DumpedRollout`` over a run."""

    overlap: Tensor = field(default_factory=lambda: zeros(0, 2))
    experts: Tensor = field(default_factory=lambda: zeros(0, 2))
    counts: Counter[str] = field(default_factory=Counter)

    def close(self, rollout: DumpedRollout) -> None:
        self.counts.update(rollout.routing)
        if rollout.routes is not None:
            self.overlap = sum_of(self.overlap, rollout.routes)
            self.experts = sum_of(self.experts, rollout.experts)


def has_experts(d: Diagnosis) -> bool | None:
    """Returns whether the model is a mixture of experts; None if nothing tells."""
    routing = d.of(Routing)
    if routing.counts["routed"] or len(routing.overlap):
        return True
    return d.flags.get("has_experts")
