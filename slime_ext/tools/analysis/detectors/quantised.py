"""The finding ``quantised``."""

from __future__ import annotations

import math
from itertools import pairwise

from slime_ext.tools.analysis.detectors.shared.ages import UNTOLD, fresh_and_stale
from slime_ext.tools.analysis.detectors.shared.detector import FEW, Detector, Figures, need_tokens
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
        "kv_precision",
        "position_drift",
        "stale_weights",
    ),
    what="noise that is largest at unlikely tokens: lower precision than the trainer's",
    asks="300 tokens",
    title="The sampler is noisy, most at unlikely tokens: lower precision than the trainer's.",
    evidence="""
        Mean |log-ratio| {{ distance | nats }}, in both directions; {%- if likely is none %} no tokens
        with probability above 0.75 to compare {%- else %} {{ likely | nats }} at tokens with probability
        above 0.75{% endif %}, {%- if unlikely is none %} none below 0.1{% else %} {{ unlikely | nats }}
        below 0.1{% endif %}. Two bfloat16 engines differ by less than 0.05.
    """,
    threshold="0.05 to 1 nat of mean |log-ratio|; two bfloat16 engines stay below",
    ruled_out="""
        Staleness and temperature were looked for first; a few flipped tokens do not hold the sum.
    """,
    fix="""
        fp8 or int8 weights or KV cache in the engine (--quantization, --kv-cache-dtype), or bfloat16
        logits: turn them off, train with the same, or correct for it. A lag of weights that is the same
        in every rollout looks alike; the first rollout of a run has none.
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
# SmolLM2. From LOUDER on it may be other weights.
TOO_LOUD, LOUDER = 1.0, 0.5
LEVEL = 1.5  # the largest mean |l| of a rollout over the smallest, of noise that no push takes away
UNTOLD_WEIGHTS = (
    "whether pushes change it: analyse rollouts 0 to 2 of the run, with weight versions that advance"
)
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
    found = {"distance": distance, "likely": likely, "unlikely": unlikely}
    if distance >= LOUDER and not _stays(d):
        return found | {"or_else": ("resumed_wrong_weights",), "untold": UNTOLD_WEIGHTS}
    return found if is_known else found | {"or_else": ("stale_weights",), "untold": UNTOLD}


def _stays(d: Diagnosis) -> bool:
    """Whether the distance is the same in rollouts from 0 on whose weight versions advance: other weights
    would have gone with the first push."""
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
