"""The recorded values are not the log-probs of the sampled tokens: NaN, another token's, filled in with 0."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Figures
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis


def sentinels(d: Diagnosis) -> Figures:
    """How many tokens have a number that stands for minus infinity, and the most frequent one."""
    known = d.statistics.sentinels
    return {"sentinels": known.total(), "sentinel": known.most_common(1)[0][0] if known else 0.0}
