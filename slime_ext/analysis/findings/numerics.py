"""The same weights in other arithmetic: quantised engines, experts that are routed differently."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

from slime_ext.analysis.document import Finding
from slime_ext.analysis.findings import FEW, SPOILT, Detector
from slime_ext.analysis.findings.sampling import by_probability
from slime_ext.analysis.findings.staleness import Side, fresh_and_stale
from slime_ext.analysis.findings.words import nats, share

if TYPE_CHECKING:
    from slime_ext.analysis.diagnosis import Diagnosis

FEWEST = 300  # tokens
NOISY = 0.015  # nats, mean |l|; two engines in bfloat16 stay below
LOUD = 0.1  # nats, so much that even likely tokens are far off
GROWS = 1.3  # |l| of unlikely tokens over |l| of likely ones
TOO_LOUD = 0.5  # nats; no rounding: four bits per weight make 0.35 in the tests' models
BIASED = 0.3  # share of the variance that the probability may explain
FAR, QUIET = 0.5, 0.02  # nats, of flips: the size of the 1% of the tokens that hold FEW, the median of |l|
LIKELY, UNLIKELY = 1, 8  # bins of probability: above 0.75, below 0.1


def routing_flips(d: Diagnosis) -> Finding | None:
    """Nearly all of the squared log-ratio in 1% of the tokens, far off, the others quiet."""
    if d.sums["finite"] < FEWEST:
        return None
    held, size = d.evidence.top_share, median(s.median for s in d.evidence.seen)
    squared = (d.sums.mean("squared") or 0.0) * held
    far = math.sqrt(squared / 0.01)
    if held < FEW or size > QUIET or far < FAR:
        return None
    return Finding(
        name="routing_flips",
        severity="warning",
        title="A few tokens are far off while all others agree: in a mixture of experts, routing that flips.",
        evidence=(
            f"1% of the tokens hold {share(held, 1)} of the squared log-ratio ({nats(far)} each, in the "
            f"quadratic mean); the median token is off by {nats(size)}. Extremes {d.sums.lowest:+.3g} and "
            f"{d.sums.highest:+.3g}."
        ),
        fix=(
            "Replay the sampler's routing in the trainer (slime: --use-rollout-routing-replay), or take "
            "these tokens out (icepop, trm). A dense model has this from single corrupted positions: read "
            "the worst tokens."
        ),
    )


def quantised(d: Diagnosis) -> Finding | None:
    """Unbiased noise above that of bfloat16, growing as probability falls."""
    distance = _without_age(d)
    if d.sums["finite"] < FEWEST or not NOISY <= distance < TOO_LOUD or by_probability(d) > BIASED:
        return None
    likely, unlikely = _by_bins(d, slice(LIKELY)), _by_bins(d, slice(UNLIKELY, None))
    grows = likely is not None and unlikely is not None and unlikely >= GROWS * likely
    if d.evidence.top_share >= FEW or not (grows or distance >= LOUD):
        return None
    return Finding(
        name="quantised",
        severity="warning",
        title="The sampler is noisy, most at unlikely tokens: lower precision than the trainer's.",
        evidence=(
            f"Mean |log-ratio| {nats(distance)} with no preferred sign: {_said(likely)} at tokens likelier "
            f"than 0.75, {_said(unlikely)} at those below 0.1. Two bfloat16 engines differ by less than "
            f"{NOISY}."
        ),
        fix=(
            "fp8 or int8 weights or KV cache in the engine (--quantization, --kv-cache-dtype), or bfloat16 "
            "logits: turn them off, train with the same, or correct for it. A lag of weights that is the "
            "same in every rollout looks alike; the first rollout of a run has none."
        ),
    )


def _without_age(d: Diagnosis) -> float:
    """Mean |l| of tokens of fresh weights; 0 where age may be all that there is."""
    fresh, aged = map(Side.of, fresh_and_stale(d.evidence.cells))
    if fresh.count < FEWEST <= aged.count:
        return 0.0
    distance = fresh.absolute if fresh.count >= FEWEST else d.sums.mean("absolute") or 0.0
    first = d.evidence.seen[:1]
    if first and first[0].rollout_id == 0:  # where nothing is stale
        return min(distance, first[0].absolute)
    return distance


def _by_bins(d: Diagnosis, bins: slice) -> float | None:
    """Mean |l| in bins of the probability; None without a token there."""
    count, absolute = (d.curves.column("probability", name)[bins].sum() for name in ("count", "absolute"))
    return float(absolute / count) if count else None


def _said(value: float | None) -> str:
    return "unknown" if value is None else nats(value)


BEFORE = (
    *SPOILT,
    "temperature",
    "before_temperature",
    "truncated_sampling",
    "resumed_wrong_weights",
)
DETECTORS = (
    Detector("routing_flips", routing_flips, after=(*BEFORE, "stale_weights", "stale_cache")),
    Detector("quantised", quantised, after=(*BEFORE, "routing_flips", "position_drift")),
)
