"""Computes the metrics under ``off_policy/`` from a step's totals. Their names are frozen.

docs/metrics.md gives the meaning, the unit and the healthy range of each metric. A test compares that page
with this table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from slime_ext.core.metrics.layout import DIFFERING, TAIL, MetricsLayout, Steps
from slime_ext.core.metrics.totals import Totals

PREFIX = "off_policy/"
OF_CORRECTION = ("steps/", "terms/")  # metrics of one step or term of the correction
HUGE = 700.0  # nats; exp of a little more overflows a float64
Value = Callable[[Totals], float]


def _mean(column: str, over: str = "counted") -> Value:
    return lambda t: t.mean(column, over)


def _exp(log: float) -> float:
    return math.exp(log) if log < HUGE else math.inf


def _ratio_at(q: float) -> Value:
    return lambda t: _exp(t.quantile(q)) if t["counted"] else 0.0


def _extreme(name: str, sign: int) -> Value:
    return lambda t: _exp(sign * t.highest[name]) if t["counted"] else 0.0


def _largest_log_ratio(t: Totals) -> float:
    return max(t.highest["log_ratio_max"], t.highest["log_ratio_min"]) if t["counted"] else 0.0


def _share_gone(kept: str, of: str) -> Value:
    return lambda t: 1 - t.mean(kept, of) if t[of] else 0.0


def _perplexity(sign: int) -> Value:
    return lambda t: _exp(-t.mean("log_behavior") - sign * t.mean("log_ratio")) if t["counted"] else 0.0


def _second_moment(t: Totals) -> float:
    """Computes the log of the mean squared ratio of sequences."""
    return t.log_sums["log_squared_ratios"] - math.log(t["sequences"]) if t["sequences"] else 0.0


def _ess_sequence(t: Totals) -> float:
    if not t["sequences"]:
        return 0.0
    return math.exp(2 * t.log_sums["log_ratios"] - t.log_sums["log_squared_ratios"]) / t["sequences"]


def _ess_ratio(t: Totals) -> float:
    n = t["counted"]
    square = t["ratio_minus_one_squared"] + 2 * t["ratio_minus_one"] + n
    if not n:
        return 0.0
    # Rounding can spoil the sum of squares of tiny ratios. By Cauchy and Schwarz, the result is in [1/n, 1].
    return min(max((t["ratio_minus_one"] + n) ** 2 / (n * square) if square > 0 else 0.0, 1 / n), 1.0)


def _chi2_sequence(t: Totals) -> float:
    """Averages e^2L - 1 over sequences; L is a sequence's log-ratio in nats.

    The result is infinite if the mean exceeds e^700.
    """
    moment = _second_moment(t)
    return math.expm1(moment) if moment < HUGE else math.inf


METRICS: dict[str, Value] = {
    "tokens": lambda t: t["response"],
    "sequences": lambda t: t["sequences"],
    "k1_kl": lambda t: -t.mean("log_ratio"),
    "k3_kl": _mean("k3"),
    "ratio_mean": lambda t: 1 + t.mean("ratio_minus_one") if t["counted"] else 0.0,
    "ratio_min": _extreme("log_ratio_min", -1),
    "ratio_max": _extreme("log_ratio_max", 1),
    "log_ratio_max": _largest_log_ratio,
    **{f"ratio_p{q:02d}": _ratio_at(q / 100) for q in (1, 10, 50, 90, 99)},
    "chi2_token": lambda t: t.mean("ratio_minus_one_squared") + 2 * t.mean("ratio_minus_one"),
    "chi2_sequence": _chi2_sequence,
    "log1p_chi2_sequence": _second_moment,  # this is the Renyi divergence of order 2
    "ess_ratio": _ess_ratio,
    "ess_sequence": _ess_sequence,
    "ess_weight": lambda t: t.ess("weight", "weight_squared", "response"),
    "weight_mean": _mean("weight", "response"),
    "weight_max": lambda t: max(t.highest["weight_max"], 0.0),
    "kept_fraction": _mean("kept", "response"),
    "rejected_fraction": _share_gone("kept", "response"),
    "rejected_sequence_fraction": _share_gone("kept_sequences", "sequences"),
    "clipped_fraction": _mean("clipped", "response"),
    "surrogate_clipped_fraction": _mean("surrogate_clipped", "response"),
    "nonfinite_fraction": _share_gone("counted", "response"),
    "perplexity_behavior": _perplexity(0),
    "perplexity_numerator": _perplexity(1),  # log(perplexity_numerator / perplexity_behavior) is k1_kl
}
STALENESS: dict[str, Value] = {
    "staleness_mean": _mean("age", "aged"),
    "staleness_max": lambda t: max(t.highest["age_max"], 0.0),
    "staleness_known_fraction": _mean("aged", "sequences"),
}
STALENESS_STEPS: dict[str, Value] = {
    "staleness_steps_mean": _mean("age_steps", "aged_steps"),
    "staleness_steps_max": lambda t: max(t.highest["age_steps_max"], 0.0),
}
CENTER: dict[str, Value] = {"tail_fraction": _mean(TAIL)}
EXACT: dict[str, Value] = {"differing_fraction": _mean(DIFFERING)}
CERTIFICATE = ("certified", "certified_k3_kl")  # host/certify.py computes them
OF_BIN: dict[str, Callable[[Mapping[str, float]], float]] = {  # from the sums of one bin
    "k3_kl": lambda row: row["k3"] / row["counted"],
    "ratio_mean": lambda row: 1 + row["ratio_minus_one"] / row["counted"],
    "weight_mean": lambda row: row["weight"] / row["counted"],
    "kept_fraction": lambda row: row["kept"] / row["counted"],
}
# The lowest and the highest healthy value; None: no limit. The ranges in docs/metrics.md begin with them.
HEALTHY: dict[str, tuple[float | None, float | None]] = {
    "k3_kl": (None, 5e-3),
    "ratio_mean": (0.99, 1.01),
    "ratio_min": (1e-4, None),
    "ratio_max": (None, 100),
    "ratio_p01": (0.5, None),
    "ratio_p10": (0.9, None),
    "ratio_p90": (None, 1.1),
    "ratio_p99": (None, 2),
    "chi2_token": (None, 0.1),
    "chi2_sequence": (None, 10),
    "log1p_chi2_sequence": (None, 2),
    "ess_ratio": (0.9, None),
    "ess_sequence": (0.1, None),
    "ess_weight": (0.5, None),
    "weight_mean": (0.9, 1.1),
    "kept_fraction": (0.9, None),
    "rejected_fraction": (None, 0.1),
    "rejected_sequence_fraction": (None, 0.3),
    "clipped_fraction": (None, 0.05),
    "surrogate_clipped_fraction": (None, 0.3),
}


def reach_of(name: str) -> tuple[float, float]:
    """Returns the smallest and the largest value that a metric can have.

    >>> reach_of("kept_fraction"), reach_of("k1_kl"), reach_of("chi2_token")
    ((0.0, 1.0), (-inf, inf), (-1.0, inf))
    """
    if name.endswith("_fraction") or name.startswith("ess_") or name == "certified":
        return 0.0, 1.0
    lowest = {"k1_kl": -math.inf, "log1p_chi2_sequence": -math.inf, "chi2_token": -1.0, "chi2_sequence": -1.0}
    return lowest.get(name, 0.0), math.inf


def known_names(correction: Steps) -> list[str]:
    """Lists every metric that a correction can have, without ``off_policy/`` and without curves."""
    layout = MetricsLayout.of(correction)
    more = CENTER if layout.head else ()
    of_correction = (*(effect.name for effect in layout.effects), *layout.terms)
    return [*METRICS, *STALENESS, *STALENESS_STEPS, *EXACT, *more, *CERTIFICATE, *of_correction]


def scalars(totals: Totals) -> dict[str, float]:
    """Computes every metric that is one number, by its full name."""
    optional = {"aged": STALENESS, "aged_steps": STALENESS_STEPS}
    known = dict(METRICS)
    for name, more in optional.items():
        known |= more if totals[name] else {}
    known |= EXACT if DIFFERING in totals.sums else {}
    known |= CENTER if TAIL in totals.sums else {}
    values = {name: value(totals) for name, value in known.items()}
    of_correction = [name for name in totals.sums if name.startswith(OF_CORRECTION)]
    values |= {name: totals.mean(name, "response") for name in of_correction}
    return {f"{PREFIX}{name}": value for name, value in values.items()}


def curves(totals: Totals) -> dict[str, float]:
    """Computes each curve's values, by full name, in each bin that holds tokens."""
    return {
        f"{PREFIX}{curve}/{label}/{name}": value
        for curve, rows in totals.curves.items()
        for label, row in rows.items()
        if row["counted"]
        for name, value in _of_bin(row, totals).items()
    }


def _of_bin(row: Mapping[str, float], totals: Totals) -> dict[str, float]:
    share = row["counted"] / totals["counted"]
    return {"share": share, **{name: value(row) for name, value in OF_BIN.items()}}
