"""Compares the run's numbers with their healthy ranges, in which a finding may be only a note."""

from __future__ import annotations

from slime_ext.core.metrics.names import HEALTHY
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis


def is_healthy(d: Diagnosis, *, lags: bool = False) -> bool:
    """Returns whether k3, chi^2 and effective sample size of all tokens are in their healthy ranges.

    Args:
        lags: whether the dump records that the weights lag. k3 does not tell what a lag costs (README's
            table), so its range is that of synchronous runs, and only the others are compared.
    """
    count, first, second = d.sums.finite, d.sums.ratio, d.sums.ratio_squared
    if not count or not second:
        return True
    numbers = {
        "k3_kl": d.sums.k3 / count,
        "chi2_token": second / count - 1,
        "ess_ratio": first * first / (count * second),
    }
    if lags:
        del numbers["k3_kl"]
    ranges = ((HEALTHY[name], value) for name, value in numbers.items())
    return all(
        (low is None or value >= low) and (high is None or value <= high) for (low, high), value in ranges
    )
