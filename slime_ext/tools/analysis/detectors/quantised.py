"""The finding ``quantised``."""

from __future__ import annotations

import math

from slime_ext.tools.analysis.detectors.shared.ages import UNTOLD, fresh_and_stale
from slime_ext.tools.analysis.detectors.shared.along import falls
from slime_ext.tools.analysis.detectors.shared.blocks import BLOCK, Blocks
from slime_ext.tools.analysis.detectors.shared.detector import FEW, Detector, Figures, Untold, need_tokens
from slime_ext.tools.analysis.detectors.shared.explained import explained_by_noise
from slime_ext.tools.analysis.detectors.shared.kinds import part_of_samples
from slime_ext.tools.analysis.detectors.shared.rounding import TOO_LOUD, stays
from slime_ext.tools.analysis.detectors.shared.sampling import by_probability
from slime_ext.tools.analysis.detectors.shared.signs import Signs
from slime_ext.tools.analysis.detectors.shared.twice import BFLOAT16, Twice, depends_on_length
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.rollouts import top_share
from slime_ext.tools.analysis.measures.versions import VersionMeans

DETECTOR = Detector(
    severity="warning",
    side="honest",
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
        "mixed_policies",
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
    what="""
        noise at nearly every token, largest at unlikely ones: the sampler has lower precision than
        the trainer
    """,
    asks="300 tokens",
    title="""
        Noise at nearly every token{% if grows %}, most at unlikely ones{% endif %} {%- if or_else is
        defined %}. {%- else %}: the sampler has lower precision. {%- endif %}
    """,
    evidence="""
        Mean |log-ratio| {{ distance | nats }}, mean log-ratio {{ "%+.2g" | format(mean) }}. {%- if
        likely is none %} No token has a probability above 0.75 {%- else %} At tokens with a
        probability above 0.75, mean |log-ratio| is {{ likely | nats }}{% endif %}; {%- if unlikely is
        none %} none has one below 0.1{% else %} below 0.1, mean |log-ratio| is {{ unlikely | nats
        }}{% endif %}. Two bfloat16 engines differ by less than 0.05.{% if is_steady %} The same text has
        the same log-probs each time, on both sides.{% endif %}
    """,
    threshold="""
        mean |l| from 0.05 nats (two bfloat16 engines stay below) to 2.5 nats; at least 3% of the
        squared log-ratio is on either side of 0, unless the mean ratio is far above exp(mean l)
    """,
    ruled_out="""
        Old weights, temperature and penalties, which were looked for first. A part of the run,
        because no sample, engine, position or token has most of the distance.
    """,
    remedy="""
        turn off fp8 or int8 weights and KV cache (--quantization, --kv-cache-dtype), or train with
        them
    """,
    fix="""
        Look for fp8 or int8 weights or KV cache in the engine (--quantization, --kv-cache-dtype), or
        bfloat16 logits. Turn them off, train with the same precision, or correct for the difference.
        A lag of weights that is the same in every rollout looks the same, but the first rollout of a
        run has no lag.
    """,
)

FEWEST = 300  # tokens
SURE = 3.0  # standard errors above NOISY
# nats, mean |l|. Two engines in bfloat16 stay below: 0.01 in small models, 0.027 in SmolLM2, whose logits of
# 16 to 32 are rounded to 1/8.
NOISY = 0.05
LOUD = 0.1  # nats, mean |l| at which even likely tokens are far off
GROWS = 1.3  # |l| of unlikely tokens over |l| of likely ones
LOUDER = 0.5  # nats, mean |l| from which on other weights may be the cause
UNTOLD_WEIGHTS = Untold(
    "whether pushes change it", "analyse rollouts 0 to 2 of the run, with versions that advance"
)
BOTH = 0.03  # share of sum l^2 of far tokens on the other side of 0
WHOLLY = 2.0  # mean l over the log of the mean ratio, up to which a missing mass explains both
MOST = 2  # other findings that are named
REPEATS = 40  # tokens with the same text before them in another sample
UNNUMBERED = "without a number"
UNTOLD_POLICY = Untold(
    "which policy samples, because its weight versions are not numbers", "look up the engine's model path"
)
UNTOLD_CHECKSUM = Untold(
    "whether the sampler has other weights than the trainer", "compare a checksum on both sides"
)
UNTOLD_LAYERS = Untold(
    "which layer differs first", "record layer outputs of both sides (layers/trainer, layers/sampler)"
)
UNTOLD_AGAIN = Untold(
    "whether one side scores the same text differently each time", "score one rollout twice on each side"
)
BIASED = 0.3  # share of the variance that the probability may explain
LIKELY, UNLIKELY = 1, 8  # bins of probability: above 0.75, below 0.1


def look(d: Diagnosis) -> Figures | None:
    """Finds unbiased noise that is larger than that of bfloat16 and grows as the probability falls.

    Old weights may look the same, so only tokens that are not known to come from old weights count.
    """
    need_tokens(d, FEWEST)
    distance, is_known = _without_age(d)
    doubt = 0.0 if is_known else SURE * d.means.absolute.error
    if not NOISY + doubt <= distance < TOO_LOUD or by_probability(d) > BIASED:
        return None
    likely, unlikely = _by_bins(d, slice(LIKELY)), _by_bins(d, slice(UNLIKELY, None))
    grows = likely is not None and unlikely is not None and unlikely >= GROWS * likely
    if top_share(d.rollouts) >= FEW or not (grows or distance >= LOUD):
        return None
    if _is_part(d):
        return None
    twice, *spreads = d.of(Twice).sums[:3].tolist()
    # Whether each side scores the same text alike each time; None: too little text comes twice.
    is_steady = max(spreads) <= BFLOAT16 * twice if twice >= REPEATS else None
    figures = {
        "distance": distance,
        "likely": likely,
        "unlikely": unlikely,
        "grows": grows,
        "mean": d.sums.mean_log_ratio,
        "is_steady": is_steady,
        "explains": explained_by_noise(d, d.rollouts),
    }
    others = _others(d, distance, is_known=is_known, is_steady=is_steady)
    return figures | {"or_else": tuple(others), "untold": tuple(others.values())} if others else figures


def _others(d: Diagnosis, distance: float, *, is_known: bool, is_steady: bool | None) -> dict[str, Untold]:
    """Returns the other findings that remain possible, and what would decide."""
    others = {} if is_known else {"stale_weights": UNTOLD}
    may_be_weights = distance >= LOUDER and is_steady is not False  # these score a text alike each time
    if may_be_weights and stays(d):
        others["another_policy"] = UNTOLD_CHECKSUM
    elif may_be_weights:
        others["resumed_wrong_weights"] = UNTOLD_WEIGHTS
    if not is_known and _is_unnumbered(d):
        others = {"another_policy": UNTOLD_POLICY}
    if not is_steady and len(others) < MOST and not depends_on_length(d):
        others["dropout"] = UNTOLD_AGAIN
    if not d.layers and len(others) < MOST:
        others["layer"] = UNTOLD_LAYERS
    first = _first_position(d)
    if not d.layers and len(others) < MOST and first and not falls(d):
        what = f"whether tokens agree at positions below {first}, where no response has any"
        step = f"sample prompts of less than {first} tokens (if their first tokens agree, it is kv_precision)"
        others["kv_precision"] = Untold(what, step)
    return others


def _first_position(d: Diagnosis) -> int:
    """Returns a position, prompt included, before which no response has a token; 0 if there is none.

    An attention that is less precise from some position on, or a shorter window, would leave earlier tokens
    alone. So it remains possible only before all tokens of the run.
    """
    reached = d.of(Blocks).table[:, :, 0].sum(1).nonzero()[:, 0]
    return BLOCK * int(reached[0]) if len(reached) else 0


def _is_unnumbered(d: Diagnosis) -> bool:
    """Returns whether the sampler names its weights, but with a name that is not a number."""
    version_parts = [p for p in d.samples.parts if p.label == "weight version"]
    return bool(version_parts) and all(p.value == UNNUMBERED for p in version_parts)


def _without_age(d: Diagnosis) -> tuple[float, bool]:
    """Returns mean |l| of tokens from fresh weights, and whether they are known to be fresh.

    The mean is 0 if old weights may explain all of it.
    """
    first = d.rollouts[:1]
    fresh, stale = map(VersionMeans.of, fresh_and_stale(d.versions))
    if first and first[0].rollout_id == 0:  # no token of rollout 0 is stale
        return min(first[0].absolute, fresh.absolute if fresh.count >= FEWEST else math.inf), True
    if fresh.count >= FEWEST:
        return fresh.absolute, False
    return (0.0 if stale.count >= FEWEST else d.sums.mean_absolute or 0.0), False


def _by_bins(d: Diagnosis, bins: slice) -> float | None:
    curve = d.curves.probability
    count, absolute = curve.count[bins].sum(), curve.absolute[bins].sum()
    return float(absolute / count) if count else None


def _is_part(d: Diagnosis) -> bool:
    """Returns whether only a part of the samples is far off, or l has one sign."""
    return part_of_samples(d) is not None or _is_one_sided(d)


def _is_one_sided(d: Diagnosis) -> bool:
    """Returns whether l has one sign because probability mass is missing.

    The sampler draws tokens that its noise makes likely, so larger noise moves l further below 0. The mean
    ratio is still 1, far above exp(mean l). If sampling kept only the mass m, the mean ratio is m, and mean l
    is log m.
    """
    below, above = d.of(Signs).far[:, 3].tolist()
    ratio = 1 + d.means.ratio_minus_one.value
    is_mass = (d.sums.mean_log_ratio or 0.0) >= WHOLLY * math.log(max(ratio, 1e-30))
    return min(below, above) < BOTH * (below + above) and is_mass
