"""The same weights in other arithmetic: errors that add up, experts that are routed differently, quantised
engines; and what none of the detectors explains."""

from __future__ import annotations

import math
from statistics import median

from slime_ext.analysis.diagnosis import Diagnosis
from slime_ext.analysis.findings.detector import FEW, Detected, detector, factor, nats, share, tokens
from slime_ext.analysis.findings.inside import INSIDE, expert_routing, kv_precision, layer
from slime_ext.analysis.findings.log_probs import SPOILT
from slime_ext.analysis.findings.push import PUSHES
from slime_ext.analysis.findings.sampling import OTHER_POLICY, by_probability
from slime_ext.analysis.findings.turns import prefix_mismatch
from slime_ext.analysis.findings.weights import (
    VersionMeans,
    fresh_and_stale,
    resumed_wrong_weights,
    stale_cache,
    stale_weights,
)

BEFORE = (*SPOILT, *OTHER_POLICY, prefix_mismatch, *PUSHES, resumed_wrong_weights, layer)
DRIFT_TOKENS = 400  # tokens
DRIFT_SURE = 6.0  # standard errors
DRIFT_TIMES, DRIFT_MATTERS = 2.5, 0.015  # of mean |l|, late over early; nats
FEWEST = 300  # tokens
NOISY = 0.025  # nats, mean |l|; two engines in bfloat16 stay below, at temperature 0.7 too
LOUD = 0.1  # nats, so much that even likely tokens are far off
GROWS = 1.3  # |l| of unlikely tokens over |l| of likely ones
TOO_LOUD = 0.5  # nats; no rounding: four bits per weight make 0.35 in the tests' models
BIASED = 0.3  # share of the variance that the probability may explain
FAR, QUIET = 0.5, 0.02  # nats, of flips: the size of the 1% of the tokens that hold FEW, the median of |l|
LIKELY, UNLIKELY = 1, 8  # bins of probability: above 0.75, below 0.1
FEWEST_TOKENS = 100  # tokens
UNEXPLAINED = 0.05  # nats, mean |l|; five times what bfloat16 makes, and more than a harmless lag of weights
UNEXPLAINED_SURE = 3.0  # standard errors above it


@detector(
    "warning",
    after=(*SPOILT, prefix_mismatch, *PUSHES, layer, kv_precision),
    needs=tokens(DRIFT_TOKENS),
    threshold=(
        "the last quarter of the tokens by position 2.5 times the first, by 6 standard errors, rising between"
    ),
    ruled_out=(
        "A step at one position (kv_precision) and a step at a turn (prefix_mismatch) were looked for first."
    ),
)
def position_drift(d: Diagnosis) -> Detected | None:
    """Finds a mean |log-ratio| that is a multiple late in the responses of what it is early."""
    count, absolute, squared = (d.curves.column("position", c) for c in ("count", "absolute", "squared"))
    reached = count.cumsum(0) / count.sum()
    parts = (reached <= 0.25, (reached > 0.25) & (reached < 0.75), reached >= 0.75)
    if not all(float(count[part].sum()) for part in parts):
        return None
    early, middle, late = (float(absolute[part].sum() / count[part].sum()) for part in parts)
    if late < max(DRIFT_MATTERS, DRIFT_TIMES * early) or not early <= middle <= late:
        return None
    error = math.sqrt(float(squared[parts[2]].sum())) / float(count[parts[2]].sum())
    if late - early < DRIFT_SURE * error:  # a few tokens far off, that happen to come late
        return None
    return Detected(
        title="The mismatch grows along the response.",
        evidence=(
            f"Mean |log-ratio| {nats(early)} in the first quarter of the tokens by position, "
            f"{nats(middle)} in the middle, {nats(late)} in the last ({factor(late / max(early, 1e-12))})."
        ),
        fix=(
            "Errors that add up: a KV cache in fp8, other rotary settings (base, scaling, maximum length) "
            "or a sliding window in the engine, recurrent layers in low precision. Sequence-level ratios "
            "suffer most: prefer geometric or token corrections. A repetition, presence or frequency "
            "penalty in sampling_params looks alike, as it reaches more tokens the longer a response "
            "gets: turn it off."
        ),
    )


@detector(
    "warning",
    after=(*BEFORE, stale_weights, stale_cache, expert_routing),
    needs=tokens(FEWEST),
    threshold="1% of the tokens hold 75% of the squared log-ratio, the median below 0.02 nats",
    ruled_out=(
        "Noise of low precision is spread over all tokens. A guess: without both sides' experts in the "
        "dump nobody can tell a flip from another corrupted token."
    ),
)
def routing_flips(d: Diagnosis) -> Detected | None:
    """Finds that 1% of the tokens hold nearly all of the squared log-ratio, while the others agree."""
    held, size = d.statistics.top_share, median(s.median for s in d.statistics.rollouts)
    squared = (d.sums.mean("squared") or 0.0) * held
    far = math.sqrt(squared / 0.01)
    if held < FEW or size > QUIET or far < FAR:
        return None
    return Detected(
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


@detector(
    "warning",
    after=(*BEFORE, expert_routing, routing_flips, kv_precision, position_drift),
    needs=tokens(FEWEST),
    threshold="0.025 to 0.5 nats of mean |log-ratio|; two bfloat16 engines stay below",
    ruled_out="Staleness and temperature were looked for first; a few flipped tokens do not hold the sum.",
)
def quantised(d: Diagnosis) -> Detected | None:
    """Finds unbiased noise above that of bfloat16 which grows as the probability falls."""
    distance = _without_age(d)
    if not NOISY <= distance < TOO_LOUD or by_probability(d) > BIASED:
        return None
    likely, unlikely = _by_bins(d, slice(LIKELY)), _by_bins(d, slice(UNLIKELY, None))
    grows = likely is not None and unlikely is not None and unlikely >= GROWS * likely
    if d.statistics.top_share >= FEW or not (grows or distance >= LOUD):
        return None
    return Detected(
        title="The sampler is noisy, most at unlikely tokens: lower precision than the trainer's.",
        evidence=(
            f"Mean |log-ratio| {nats(distance)} with no preferred sign: {_said(likely)} at tokens likelier "
            f"than 0.75, {_said(unlikely)} at those below 0.1. Two bfloat16 engines differ by less than "
            f"{NOISY}."
        ),
        fix=(
            "fp8 or int8 weights or KV cache in the engine (--quantization, --kv-cache-dtype), or "
            "bfloat16 logits: turn them off, train with the same, or correct for it. A lag of weights "
            "that is the same in every rollout looks alike; the first rollout of a run has none."
        ),
    )


def _without_age(d: Diagnosis) -> float:
    """Mean |l| of tokens that fresh weights sampled; 0 where all of it may come from old weights."""
    fresh, aged = map(VersionMeans.of, fresh_and_stale(d.statistics.versions))
    if fresh.count < FEWEST <= aged.count:
        return 0.0
    distance = fresh.absolute if fresh.count >= FEWEST else d.sums.mean("absolute") or 0.0
    first = d.statistics.rollouts[:1]
    if first and first[0].rollout_id == 0:  # where nothing is stale
        return min(distance, first[0].absolute)
    return distance


def _by_bins(d: Diagnosis, bins: slice) -> float | None:
    """Mean |l| over some bins of the probability; None without a token there."""
    count, absolute = (d.curves.column("probability", name)[bins].sum() for name in ("count", "absolute"))
    return float(absolute / count) if count else None


def _said(value: float | None) -> str:
    return "unknown" if value is None else nats(value)


def unexplained(d: Diagnosis) -> Detected | None:
    """Finds a mean |log-ratio| that is significantly above what arithmetic makes."""
    distance = d.statistics.means["absolute"]
    if distance.value - UNEXPLAINED_SURE * distance.error < UNEXPLAINED:
        return None
    return Detected(
        title="The policies are far apart, and no detector can tell why.",
        evidence=(
            f"Mean |log-ratio| {nats(distance.value)} ± {distance.error:.1g}, k3 "
            f"{nats(d.sums.mean('k3'))}. Two engines in bfloat16 with the same weights stay below "
            f"{UNEXPLAINED}."
        ),
        fix=(
            "Find the cause before you train on: score one fixed text with both sides (the same "
            "weights?), compare the request's sampling_params with the trainer's flags (temperature, "
            "top-p, penalties, logit bias), the tokens that are scored with those that the engine "
            "returned (chat template, text tokenised again), and where its log-probs begin. Read the "
            "worst tokens."
        ),
    )


DETECTORS = (*INSIDE, position_drift, routing_flips, quantised)
