"""Measures how l depends on how often a token came before, among equally certain tokens."""

from __future__ import annotations

import math

from slime_ext.tools.analysis.measures.diagnosis import Diagnosis


def rise(d: Diagnosis, level: int = 1) -> tuple[float, float]:
    """Returns mean l of repeated tokens minus that of equally certain new tokens, and its standard error.

    Repeated tokens came at least ``level`` times before in their response.
    """
    seen = d.statistics.shared.seen
    new, again = seen[0], seen[level:].sum(0)
    known = (new[:, 0] >= 10) & (again[:, 0] >= 10)
    if not known.any():
        return 0.0, 0.0
    n, m = new[known, 0], again[known, 0]
    weights = m / m.sum()
    apart = again[known, 1] / m - new[known, 1] / n
    of_new = (new[known, 3] / n - (new[known, 1] / n).square()).clamp_min(0) / n
    of_again = (again[known, 3] / m - (again[known, 1] / m).square()).clamp_min(0) / m
    error = math.sqrt(float((weights.square() * (of_new + of_again)).sum()))
    return float((weights * apart).sum()), error
