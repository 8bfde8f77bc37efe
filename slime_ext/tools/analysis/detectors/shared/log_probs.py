"""Counts the numbers that an engine writes for minus infinity in place of a log-prob."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Figures
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis


def sentinels(d: Diagnosis) -> Figures:
    """Returns how many tokens have such a number, and the most frequent number."""
    known = d.statistics.sentinels
    return {"sentinels": known.total(), "sentinel": known.most_common(1)[0][0] if known else 0.0}
