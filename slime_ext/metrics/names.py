"""The frozen names: what each metric is, its unit, what is healthy, and its value from the totals of a step.

docs/metrics.md holds the same table; a test compares them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from slime_ext.metrics.accumulator import Totals
from slime_ext.metrics.layout import MetricsLayout, Steps

PREFIX = "off_policy/"
RANGE = re.compile(
    r"(?P<low>[\d.e-]+) to (?P<high>[\d.e-]+)|above (?P<above>[\d.e-]+)|below (?P<below>[\d.e-]+)"
)
DECIDED = frozenset(  # what a correction decides; the other names say how far the policies are apart
    "ess_weight weight_mean weight_max kept_fraction rejected_fraction rejected_sequence_fraction "
    "clipped_fraction surrogate_clipped_fraction".split()
)
HUGE = 700.0  # exp of more nats overflows a float64


class Metric(NamedTuple):
    """One name under ``off_policy/``."""

    name: str
    unit: str
    definition: str
    healthy: str
    value: Callable[[Totals], float] | None = None  # None: one per step, or per bin of a curve


def _mean(column: str, over: str = "counted") -> Callable[[Totals], float]:
    return lambda t: t.mean(column, over)


def _exp(log: float) -> float:
    return math.exp(log) if log < HUGE else math.inf


def _ratio_at(q: float) -> Callable[[Totals], float]:
    return lambda t: _exp(t.quantile(q)) if t["counted"] else 0.0


def _extreme(name: str, sign: int) -> Callable[[Totals], float]:
    return lambda t: _exp(sign * t.highest[name]) if t["counted"] else 0.0


def _share_gone(kept: str, of: str) -> Callable[[Totals], float]:
    return lambda t: 1 - t.mean(kept, of) if t[of] else 0.0


def _perplexity(sign: int) -> Callable[[Totals], float]:
    return lambda t: _exp(-t.mean("log_behavior") - sign * t.mean("log_ratio")) if t["counted"] else 0.0


def _second_moment(t: Totals) -> float:
    """log of the mean squared ratio of sequences."""
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
    # Of tiny ratios rounding decides what is left of the squares; by Cauchy and Schwarz it lies in here.
    return min(max((t["ratio_minus_one"] + n) ** 2 / (n * square) if square > 0 else 0.0, 1 / n), 1.0)


METRICS = (
    Metric("tokens", "tokens", "n, response tokens", "the batch's", lambda t: t["response"]),
    Metric("sequences", "samples", "samples with response tokens", "the batch's", lambda t: t["sequences"]),
    Metric(
        "k1_kl",
        "nats per token",
        "mean of -l: unbiased estimate of KL(behavior ‖ numerator), of either sign",
        "near 0; of the size of k3_kl",
        lambda t: -t.mean("log_ratio"),
    ),
    Metric(
        "k3_kl",
        "nats per token",
        "mean of ρ − 1 − l: unbiased estimate of the same KL, never negative",
        "below 1e-3; above 1e-2 the policies differ much",
        _mean("k3"),
    ),
    Metric(
        "ratio_mean",
        "ratio",
        "mean of ρ; 1 in expectation, whatever the policies",
        "0.99 to 1.01; far from 1 the estimate has broken down",
        lambda t: 1 + t.mean("ratio_minus_one") if t["counted"] else 0.0,
    ),
    Metric(
        "ratio_min",
        "ratio",
        "smallest ρ of the step, all ranks",
        "above 1e-4",
        _extreme("log_ratio_min", -1),
    ),
    Metric(
        "ratio_max", "ratio", "largest ρ of the step, all ranks", "below 100", _extreme("log_ratio_max", 1)
    ),
    *(
        Metric(
            f"ratio_p{q:02d}",
            "ratio",
            f"ρ below which {q}% of the tokens lie, l off by at most 3.1% of itself",
            healthy,
            _ratio_at(q / 100),
        )
        for q, healthy in (
            (1, "above 0.5"),
            (10, "above 0.9"),
            (50, "1"),
            (90, "below 1.1"),
            (99, "below 2"),
        )
    ),
    Metric(
        "chi2_token",
        "none",
        "mean of ρ² − 1: chi-square divergence per token",
        "below 0.1",
        lambda t: t.mean("ratio_minus_one_squared") + 2 * t.mean("ratio_minus_one"),
    ),
    Metric(
        "chi2_sequence",
        "none",
        "mean over sequences of e^2L − 1, L the sum of l over the sequence; infinite beyond e^700",
        "below 10; grows exponentially with length",
        lambda t: math.expm1(s) if (s := _second_moment(t)) < HUGE else math.inf,
    ),
    Metric(
        "log1p_chi2_sequence",
        "nats",
        "log(1 + chi2_sequence), formed in log space: the Renyi divergence of order 2",
        "below 2",
        _second_moment,
    ),
    Metric(
        "ess_ratio",
        "fraction",
        "(Σρ)² / (n Σρ²) of token ratios; of ratios below 0.01 without digits",
        "above 0.9",
        _ess_ratio,
    ),
    Metric(
        "ess_sequence",
        "fraction",
        "the same of sequence ratios e^L, n sequences",
        "above 0.1; what token weights cannot see",
        _ess_sequence,
    ),
    Metric(
        "ess_weight",
        "fraction",
        "the same of the weights that multiplied the loss, 0 at rejected tokens; 0 when nothing is kept",
        "above 0.5",
        lambda t: t.ess("weight", "weight_squared", "response"),
    ),
    Metric(
        "weight_mean",
        "weight",
        "mean weight over response tokens, 0 at rejected ones",
        "0.9 to 1.1",
        _mean("weight", "response"),
    ),
    Metric(
        "weight_max",
        "weight",
        "largest weight of the step, all ranks",
        "at most the cap",
        lambda t: max(t.highest["weight_max"], 0.0),
    ),
    Metric(
        "kept_fraction",
        "fraction",
        "response tokens that stay in the policy loss",
        "above 0.9; below 0.5 the run learns from little",
        _mean("kept", "response"),
    ),
    Metric(
        "rejected_fraction", "fraction", "1 - kept_fraction", "below 0.1", _share_gone("kept", "response")
    ),
    Metric(
        "rejected_sequence_fraction",
        "fraction",
        "samples that a step at unit sequence, a veto or their group took out; with such a step a "
        "non-finite log-prob does, too",
        "below 0.3",
        _share_gone("kept_sequences", "sequences"),
    ),
    Metric(
        "clipped_fraction",
        "fraction",
        "response tokens whose weight a bound changed",
        "below 0.05",
        _mean("clipped", "response"),
    ),
    Metric(
        "surrogate_clipped_fraction",
        "fraction",
        "response tokens at which a surrogate of ours clipped; 0 with the host's own loss",
        "below 0.3",
        _mean("surrogate_clipped", "response"),
    ),
    Metric(
        "nonfinite_fraction",
        "fraction",
        "response tokens whose behavior log-prob is NaN or infinite",
        "0",
        _share_gone("counted", "response"),
    ),
    Metric(
        "perplexity_behavior",
        "perplexity",
        "exp of the mean of -log behavior",
        "that of the numerator within 1%",
        _perplexity(0),
    ),
    Metric(
        "perplexity_numerator",
        "perplexity",
        "exp of the mean of -log numerator; the log of their quotient is k1_kl",
        "slowly falling; a jump is a broken update",
        _perplexity(1),
    ),
)
STALENESS = (
    Metric(
        "staleness_mean",
        "weight versions",
        "mean age of samples: the trainer's version less that of the oldest weights that sampled it",
        "at most the configured lag",
        _mean("age", "aged"),
    ),
    Metric(
        "staleness_max",
        "weight versions",
        "largest such age",
        "at most max_staleness",
        lambda t: max(t.highest["age_max"], 0.0),
    ),
    Metric(
        "staleness_known_fraction",
        "fraction",
        "samples whose age is known",
        "1",
        _mean("aged", "sequences"),
    ),
)
CERTIFICATE = (
    Metric(
        "certified",
        "0 or 1",
        "whether the latest push is sound, once per push; absent where nobody can say",
        "1",
    ),
    Metric(
        "certified_k3_kl",
        "nats per token",
        "k3_kl over responses that the pushed weights sampled, scored before the trainer stepped: numerics "
        "alone",
        "that of the first push within a factor of 10",
    ),
)
PER_STEP = (
    Metric(
        "rejected_fraction",
        "fraction",
        "response tokens that this step rejects, whatever the others do",
        "below 0.1",
    ),
    Metric(
        "kept_fraction",
        "fraction",
        "response tokens that are left after this step and those before it",
        "above 0.9",
    ),
    Metric(
        "clipped_fraction",
        "fraction",
        "response tokens whose weight this step changed",
        "below 0.05",
    ),
)
CURVE_METRICS = (
    Metric("share", "fraction", "of the tokens with a finite behavior log-prob", "-"),
    Metric("k3_kl", "nats per token", "as above, over the bin", "flat"),
    Metric("ratio_mean", "ratio", "as above, over the bin", "1 in every bin"),
    Metric("weight_mean", "weight", "as above, over the bin", "flat"),
    Metric("kept_fraction", "fraction", "as above, over the bin", "flat"),
)


def healthy_range(name: str) -> tuple[float | None, float | None]:
    """Lower and upper end of what is healthy for a metric, as its text begins; None where it names no such
    end.

    >>> healthy_range("k3_kl"), healthy_range("ess_weight"), healthy_range("weight_mean")
    ((None, 0.001), (0.5, None), (0.9, 1.1))
    """
    text = next(metric.healthy for metric in METRICS + STALENESS if metric.name == name)
    found = RANGE.match(text)
    low, high = (found["low"] or found["above"], found["high"] or found["below"]) if found else (None, None)
    return low and float(low), high and float(high)


def row(metric: Metric) -> str:
    """A metric as a line of the tables in docs/metrics.md."""
    return f"| `{metric.name}` | {metric.unit} | {metric.definition} | {metric.healthy} |"


def known_names(correction: Steps) -> list[str]:
    """The names, without ``off_policy/``, of every metric of one number that a correction can have."""
    of_steps = (effect.name for effect in MetricsLayout.of(correction).effects)
    return [*(metric.name for metric in METRICS + STALENESS + CERTIFICATE), *of_steps]


def scalars(totals: Totals) -> dict[str, float]:
    """Every metric of one number, by its full name."""
    known = METRICS + STALENESS if totals["aged"] else METRICS
    found = {metric.name: metric.value(totals) for metric in known}
    of_steps = {name: totals.mean(name, "response") for name in totals.sums if name.startswith("steps/")}
    return {f"{PREFIX}{name}": value for name, value in {**found, **of_steps}.items()}


def curves(totals: Totals) -> dict[str, float]:
    """Every bin of every curve that holds tokens, by its full name."""
    return {
        f"{PREFIX}{curve}/{label}/{metric.name}": value
        for curve, rows in totals.curves.items()
        for label, row in rows.items()
        if row["counted"]
        for metric, value in zip(CURVE_METRICS, _of_bin(row, totals), strict=True)
    }


def of_policies(values: Mapping[str, float]) -> dict[str, float]:
    """The metrics of which no correction decides."""
    return {name: value for name, value in values.items() if name.rpartition("/")[2] not in DECIDED}


def _of_bin(row: dict[str, float], totals: Totals) -> Iterator[float]:
    n = row["counted"]
    yield n / totals["counted"]
    yield row["k3"] / n
    yield 1 + row["ratio_minus_one"] / n
    yield row["weight"] / n
    yield row["kept"] / n
