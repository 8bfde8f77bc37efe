"""The finding ``scaled_log_probs``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, Margin, need_tokens
from slime_ext.tools.analysis.detectors.shared.explained import VALUES, explained_by_values
from slime_ext.tools.analysis.detectors.shared.surprise import BySurprise
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    side="altered",
    group="other_policy",
    after=("spoilt", "kept_mass"),
    what="the log-probs of one side are multiplied by a factor after the softmax",
    asks="300 tokens",
    title="""
        {%- if is_divided %} The sampler's log-probs, not its logits, were divided by a temperature of {{
        "%.2g" | format(temperature) }} or a little more. {%- else %} The sampler's log-probs are {{ "%.3g" |
        format(factor) }} times the trainer's. {%- endif %}
    """,
    evidence="""
        The log-ratio is {{ "above" if mean > 0 else "below" }} 0 at nearly every token (mean {{
        "%+.3g" | format(mean) }} nats, mean size {{ absolute | nats }}), so the probabilities of one
        side do not sum to 1. {%- if is_divided %} From tokens of {{ "%.2g" | format(first) }} to
        those of {{ "%.2g" | format(last) }} nats, it fits temperatures of {{ "%.3g" | format(lowest)
        }} to {{ "%.3g" | format(highest) }}. {%- else %} It is {{ "%.3g" | format(lowest) }} to {{
        "%.3g" | format(highest) }} times -log-prob, from tokens of {{ "%.2g" | format(first) }} to
        those of {{ "%.2g" | format(last) }} nats. {%- endif %}
    """,
    threshold="""
        |mean l| is 98% of mean |l|, and 80% among equally certain tokens; one factor (within 10%) or
        one temperature (within 15%) fits all of them
    """,
    ruled_out="""
        Two temperatures, noise or old weights, because then the probabilities of both sides would sum
        to 1, and some sampled tokens would be likelier for each side.
    """,
    remedy="return a plain log-softmax of the logits, without a factor or label smoothing after it",
    fix="""
        Divide the logits by the temperature before the log-softmax, not the log-probs after it.
        Compare one sequence with the engine's own log-probs.
    """,
)
FEWEST, TOKENS, SMALL = 300, 20, 0.01  # tokens; tokens of a bin; nats, mean |l| that rounding alone may make
LEANS, LEAST = 0.98, 0.8  # |sum l| over sum |l|, of all tokens and of each bin
FIRST, LAST = 5e-3, 0.3  # nats of -log behavior, at which one other token has nearly all of the rest
ONE_FACTOR, ONE_TEMPERATURE, BINS = 0.1, 0.15, 3  # relative spreads; bins
COLDEST = 0.2  # lowest temperature


class _Bin(NamedTuple):
    """Equally certain tokens: mean -log behavior, mean l, and mean l over mean |l|."""

    surprise: float
    log_ratio: float
    lean: float


def look(d: Diagnosis) -> Figures | None:
    """Finds log-probs that were multiplied or divided after the softmax.

    The former makes l = (1 / f - 1) log behavior. The latter makes l = -log sum p^(1/T) with p = softmax(z).
    If the sampler is sure, one other token has nearly all of 1 - p, so l = -log(p^(1/T) + (1 - p)^(1/T)).
    """
    need_tokens(d, FEWEST)
    table = d.of(BySurprise).sums
    bins = [
        _Bin(x / n, signed / n, signed / max(absolute, 1e-30))
        for n, signed, absolute, *_, x in table.tolist()
        if n >= TOKENS and x / n >= FIRST
    ]
    mean, absolute = d.sums.mean_log_ratio or 0.0, d.sums.mean_absolute or 0.0
    sign = math.copysign(1.0, mean)
    if absolute < SMALL or len(bins) < BINS or abs(mean) < LEANS * absolute:
        return None
    if min(sign * one.lean for one in bins) < LEAST:
        return None
    explains = explained_by_values(d, table[:, VALUES])
    # The factor is known as well as mean l is; one far sample alone makes its error as large as the mean.
    margin = Margin(abs(mean), d.means.log_ratio.error, SMALL)
    figures = {"mean": mean, "absolute": absolute, "margin": margin, "explains": explains}
    shares = [one.log_ratio / one.surprise for one in bins]
    if _is_one(shares, ONE_FACTOR) and max(shares) < 1:
        factor = 1 / (1 - sum(shares) / len(shares))
        return figures | _range(bins, shares) | {"is_divided": False, "factor": factor}
    sure = [one for one in bins if one.surprise <= LAST]
    temperatures = [t for one in sure if (t := _temperature(one)) is not None]
    if len(temperatures) < max(len(sure), 2) or not _is_one(temperatures, ONE_TEMPERATURE):
        return None
    return figures | _range(sure, temperatures) | {"is_divided": True, "temperature": max(temperatures)}


def _is_one(values: Sequence[float], spread: float) -> bool:
    return max(map(abs, values)) <= (1 + spread) * min(map(abs, values))


def _range(bins: Sequence[_Bin], values: Sequence[float]) -> dict[str, float]:
    surprises = [one.surprise for one in bins]
    return {
        "first": min(surprises),
        "last": max(surprises),
        "lowest": min(values),
        "highest": max(values),
    }


def _temperature(one: _Bin) -> float | None:
    """Returns the temperature below 1 that explains l; None if none does.

    It solves l = -log(p^(1/T) + (1 - p)^(1/T)) with log behavior = log(p) / T.
    """

    def expected(temperature: float) -> float:
        rest = -math.expm1(-temperature * one.surprise)
        return -math.log(math.exp(-one.surprise) + rest ** (1 / temperature))

    low, high = COLDEST, 1.0
    if not 0 < one.log_ratio < expected(low):
        return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle) > one.log_ratio else (low, middle)
    return low
