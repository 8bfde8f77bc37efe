"""Compares the run's numbers with their healthy ranges, in which a finding may be only a note."""

from __future__ import annotations

from slime_ext.core.metrics.names import HEALTHY
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis


def is_healthy(d: Diagnosis) -> bool:
    """Returns whether k3, chi^2 and effective sample size of all tokens are in their healthy ranges."""
    count, first, second = d.sums.finite, d.sums.ratio, d.sums.ratio_squared
    if not count or not second:
        return True
    numbers = {
        "k3_kl": d.sums.k3 / count,
        "chi2_token": second / count - 1,
        "ess_ratio": first * first / (count * second),
    }
    ranges = ((HEALTHY[name], value) for name, value in numbers.items())
    return all(
        (low is None or value >= low) and (high is None or value <= high) for (low, high), value in ranges
    )
