"""The finding ``quantised``."""

from __future__ import annotations

import math
from itertools import pairwise

from slime_ext.tools.analysis.detectors.shared.ages import UNTOLD, fresh_and_stale
from slime_ext.tools.analysis.detectors.shared.detector import FEW, Detector, Figures, need_tokens
from slime_ext.tools.analysis.detectors.shared.kinds import two_kinds
from slime_ext.tools.analysis.detectors.shared.sampling import by_probability
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.versions import VersionMeans

DETECTOR = Detector(
    severity="warning",
    after=(
        "spoilt",
        "other_policy",
        "prefixes",
        "pushes",
        "resumed_wrong_weights",
        "layer",
        "expert_routing",
        "routing_flips",
        "sparse",
        "penalties",
        "rollouts_apart",
        "kv_precision",
        "position_drift",
        "stale_weights",
        "parts",
        "experts",
        "another_policy",
        "prompt_cut",
    ),
    what="noise that is largest at unlikely tokens: lower precision than the trainer's",
    asks="300 tokens",
    title="""
        Noise at nearly every token{% if grows %}, most at unlikely ones{% endif %}: lower precision in
        the sampler.
    """,
    evidence="""
        Mean |log-ratio| {{ distance | nats }}, mean log-ratio {{ "%+.2g" | format(mean) }}; {%- if
        likely is none %} no tokens with probability above 0.75 {%- else %} {{ likely | nats }} at
        tokens with probability above 0.75{% endif %}, {%- if unlikely is none %} none below 0.1{% else
        %} {{ unlikely | nats }} below 0.1{% endif %}. Two bfloat16 engines differ by less than 0.05.{%
        if again %} The same text has the same log-probs each time, on both sides.{% endif %}
    """,
    threshold="""
        mean |l| of 0.05 nats (two bfloat16 engines stay below) to 2.5 nats; 3% of the squared
        log-ratio on either side of 0, unless the mean ratio is far above exp(mean l)
    """,
    ruled_out="""
        Old weights, temperature and penalties were looked for first. No sample, engine, place or
        token has most of the distance.
    """,
    fix="""
        fp8 or int8 weights or KV cache in the engine (--quantization, --kv-cache-dtype), or
        bfloat16 logits: turn them off, train with the same, or correct for it. A lag of weights
        that is the same in every rollout looks alike; the first rollout of a run has no lag.
    """,
)

FEWEST = 300  # tokens
SURE = 3.0  # standard errors above it
# nats, mean |l|. Two engines in bfloat16 stay below: 0.01 in small models, 0.027 in SmolLM2, whose logits of
# 16 to 32 are rounded to 1/8.
NOISY = 0.05
LOUD = 0.1  # nats, so much that even likely tokens are far off
GROWS = 1.3  # |l| of unlikely tokens over |l| of likely ones
# nats; what no rounding makes: four bits per weight (32 of one scale) make 0.35 in the tests' models, 0.74 in
# SmolLM2, three bits above 1. From LOUDER on it may be other weights.
TOO_LOUD, LOUDER = 2.5, 0.5
LEVEL = 1.5  # the largest mean |l| of a rollout over the smallest, of noise that no push takes away
UNTOLD_WEIGHTS = (
    "whether pushes change it: analyse rollouts 0 to 2 of the run, with weight versions that advance"
)
BOTH = 0.03  # share of sum l^2 of far tokens on the other side of 0
WHOLLY = 2.0  # mean l over the log of the mean ratio, of a mass that is missing
ABOVE = 6.0  # standard errors of the mean ratio above 1, which no weights make over what was sampled
MOST = 2  # names beside its own
AGAIN = 40  # tokens in samples that are equal up to there
UNNUMBERED = "without a number"
UNTOLD_POLICY = "whose policy samples: its weight versions are no numbers"
UNTOLD_CHECKSUM = "whether the sampler has other weights than the trainer: compare a checksum on both sides"
UNTOLD_LAYERS = "which layer parts first: record layer outputs of both sides (rotary settings, norms)"
UNTOLD_AGAIN = "whether one side scores the same text otherwise each time: score one rollout twice"
BIASED = 0.3  # share of the variance that the probability may explain
LIKELY, UNLIKELY = 1, 8  # bins of probability: above 0.75, below 0.1


def look(d: Diagnosis) -> Figures | None:
    """Finds unbiased noise above that of bfloat16 which grows as the probability falls. Old weights may look
    so too: only tokens that are not of such are judged."""
    need_tokens(d, FEWEST)
    distance, is_known = _without_age(d)
    doubt = 0.0 if is_known else SURE * d.statistics.means["absolute"].error
    if not NOISY + doubt <= distance < TOO_LOUD or by_probability(d) > BIASED:
        return None
    likely, unlikely = _by_bins(d, slice(LIKELY)), _by_bins(d, slice(UNLIKELY, None))
    grows = likely is not None and unlikely is not None and unlikely >= GROWS * likely
    if d.statistics.top_share >= FEW or not (grows or distance >= LOUD):
        return None
    if _is_part(d) or d.statistics.means["ratio_minus_one"].z >= ABOVE:
        return None
    again = d.statistics.shared.twice[1].tolist()
    is_again = again[0] >= AGAIN
    found = {
        "distance": distance,
        "likely": likely,
        "unlikely": unlikely,
        "grows": grows,
        "mean": d.sums.mean("log_ratio"),
        "again": is_again,
    }
    others = _others(d, distance, is_known=is_known, is_again=is_again)
    return found | {"or_else": tuple(others), "untold": "; nor ".join(others.values())} if others else found


def _others(d: Diagnosis, distance: float, *, is_known: bool, is_again: bool) -> dict[str, str]:
    """What else it may be, and what would tell."""
    others = {} if is_known else {"stale_weights": UNTOLD}
    if distance >= LOUDER and _stays(d):
        others["another_policy"] = UNTOLD_CHECKSUM
    elif distance >= LOUDER:
        others["resumed_wrong_weights"] = UNTOLD_WEIGHTS
    if not is_known and _is_unnumbered(d):
        others = {"another_policy": UNTOLD_POLICY}
    if not is_again and len(others) < MOST:
        others["dropout"] = UNTOLD_AGAIN
    if not d.layers and len(others) < MOST:
        others["layer"] = UNTOLD_LAYERS
    return others


def _is_unnumbered(d: Diagnosis) -> bool:
    """Whether a sampler names its weights, and the name is no version."""
    named = [p for p in d.statistics.samples.parts if p.label == "weight version"]
    return bool(named) and all(p.value == UNNUMBERED for p in named)


def _stays(d: Diagnosis) -> bool:
    """Whether the distance is the same in rollouts from 0 on whose weight versions advance: weights that one
    push replaces would have gone with the first."""
    rollouts, evened = d.statistics.rollouts, d.statistics.evened()
    is_pushed = all(b.version > a.version >= 0 for a, b in pairwise(rollouts))
    begins = len(rollouts) >= 3 and rollouts[0].rollout_id == 0
    return begins and is_pushed and max(evened) <= LEVEL * min(evened)


def _without_age(d: Diagnosis) -> tuple[float, bool]:
    """Mean |l| of tokens that fresh weights sampled, 0 where all of it may come from old weights; and whether
    they are known to be fresh."""
    first = d.statistics.rollouts[:1]
    fresh, stale = map(VersionMeans.of, fresh_and_stale(d.statistics.versions))
    if first and first[0].rollout_id == 0:  # where nothing is stale
        return min(first[0].absolute, fresh.absolute if fresh.count >= FEWEST else math.inf), True
    if fresh.count >= FEWEST:
        return fresh.absolute, False
    return (0.0 if stale.count >= FEWEST else d.sums.mean("absolute") or 0.0), False


def _by_bins(d: Diagnosis, bins: slice) -> float | None:
    count, absolute = (d.curves.column("probability", name)[bins].sum() for name in ("count", "absolute"))
    return float(absolute / count) if count else None


def _is_part(d: Diagnosis) -> bool:
    """Whether the distance is that of a part of the samples, or lies on one side."""
    kinds = two_kinds(d)
    return (kinds is not None and kinds.far[0] < kinds.near[0]) or _is_one_sided(d)


def _is_one_sided(d: Diagnosis) -> bool:
    """Whether l has one sign because a mass is missing, and not because it is large.

    The sampler favours what noise makes likely for it, so l leans below 0 the more, the louder the noise.
    The mean ratio remains 1 all the same, far above exp(mean l). If a mass m was renormalised away, the mean
    ratio is m, and mean l is log m.
    """
    below, above = d.statistics.shared.signs[:, 3].tolist()
    ratio = 1 + d.statistics.means["ratio_minus_one"].value
    is_mass = d.sums.mean("log_ratio") >= WHOLLY * math.log(max(ratio, 1e-30))
    return min(below, above) < BOTH * (below + above) and is_mass
