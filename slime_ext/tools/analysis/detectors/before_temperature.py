"""The finding ``before_temperature``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.detectors.shared.sampling import FEWEST, by_probability, is_scaled
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    group="other_policy",
    after=("spoilt", "kept_mass", "scaled_log_probs", "truncated_sampling"),
    what="the engine's log-probs are from before the temperature",
    asks="300 tokens",
    title="The sampler's log-probs are from before the temperature (or another processor) was applied.",
    evidence="""
        The recorded policy is not the one that sampled: its mean log-ratio is +{{ mean | nats }}, its
        mean ratio {{ "%.3f" | format(ratio) }} ± {{ "%.1g" | format(error) }}; sampled from, they would
        be below 0 and 1. {{ explained | share(1) }} of the variance of the log-ratio follows from the
        probability.
    """,
    threshold="""
        mean ratio above 1 and mean log-ratio above 0 by 3 standard errors, 35% of the variance by
        probability
    """,
    ruled_out="Staleness or rounding: over what the recorded policy sampled neither can be above.",
    fix="""
        Have the engine return log-probs after temperature (SGLang: do not set
        SGLANG_RETURN_ORIGINAL_LOGPROB; vLLM: logprobs_mode=processed_logprobs).
    """,
)

# The same where it is known that temperatures differ: the sign alone tells of which kind.
DECIDED = 3.0


def look(d: Diagnosis) -> Figures | None:
    """Finds log-ratios that are a function of the probability and whose means, and those of the ratio, are
    above what sampling allows."""
    need_tokens(d, FEWEST)
    log_ratio, above_1 = d.statistics.means["log_ratio"], d.statistics.means["ratio_minus_one"]
    if not is_scaled(d) or min(log_ratio.z, above_1.z) < DECIDED:
        return None
    ratio, explained = 1 + above_1.value, by_probability(d)
    return {"mean": log_ratio.value, "ratio": ratio, "error": above_1.error, "explained": explained}
