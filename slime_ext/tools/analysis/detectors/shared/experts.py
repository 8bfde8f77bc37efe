"""Whether the model is a mixture of experts, as far as a dump or the run's flags tell."""

from __future__ import annotations

from slime_ext.tools.analysis.measures.diagnosis import Diagnosis


def has_experts(d: Diagnosis) -> bool | None:
    """None where nothing tells."""
    if d.statistics.counts["routed"] or len(d.statistics.routes):
        return True
    return d.flags.get("has_experts")
