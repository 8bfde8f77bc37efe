"""Counts the experts that both sides chose, and tells a mixture of experts from a dense model."""

from __future__ import annotations

from dataclasses import field

from torch import Tensor

from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import sum_of, zeros


class Routing(Measure):
    """The number of samples with experts, and the sums of ``routes`` and ``experts`` of ``DumpedRollout``."""

    overlap: Tensor = field(default_factory=lambda: zeros(0, 2))
    experts: Tensor = field(default_factory=lambda: zeros(0, 2))
    routed: int = 0

    def close(self, rollout: DumpedRollout) -> None:
        self.routed += rollout.routing.get("routed", 0)
        if rollout.routes is not None:
            self.overlap = sum_of(self.overlap, rollout.routes)
            self.experts = sum_of(self.experts, rollout.experts)


def has_experts(d: Diagnosis) -> bool | None:
    """Returns whether the model is a mixture of experts; None if nothing tells."""
    routing = d.of(Routing)
    if routing.routed or len(routing.overlap):
        return True
    return d.flags.get("has_experts")
