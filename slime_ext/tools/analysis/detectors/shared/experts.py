"""Tells a mixture of experts from a dense model, by the dump or the run's flags."""

from __future__ import annotations

from slime_ext.tools.analysis.measures.diagnosis import Diagnosis


def has_experts(d: Diagnosis) -> bool | None:
    """Returns whether the model is a mixture of experts; None if nothing tells."""
    if d.statistics.counts["routed"] or len(d.statistics.routes):
        return True
    return d.flags.get("has_experts")
