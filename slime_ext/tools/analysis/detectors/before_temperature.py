"""The finding ``before_temperature``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.detectors.shared.explained import VALUES
from slime_ext.tools.analysis.detectors.shared.same_text import explained_by_temperature
from slime_ext.tools.analysis.detectors.shared.sampling import FEWEST, by_probability, is_scaled, margin
from slime_ext.tools.analysis.detectors.shared.surprise import BySurprise
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    side="altered",
    group="other_policy",
    after=("spoilt", "kept_mass", "scaled_log_probs", "truncated_sampling", "soft_cap"),
    what="the engine returns log-probs from before the temperature",
    asks="300 tokens",
    title="The sampler's log-probs were taken before the temperature (or another processor) was applied.",
    evidence="""
        The recorded policy did not sample these tokens, because its mean log-ratio is +{{ mean | nats
        }} and its mean ratio {{ "%.3f" | format(ratio) }} ± {{ "%.1g" | format(error) }}: for the
        policy that sampled, they would be below 0 and 1. {{ explained | share(1) }} of the variance
        of the log-ratio follows from the probability.
    """,
    threshold="""
        mean ratio above 1 and mean log-ratio above 0, each by 3 standard errors; the probability
        explains 35% of the variance
    """,
    ruled_out="""
        Old weights or rounding, because neither lets the means exceed what sampling from the recorded
        policy allows.
    """,
    fix="""
        Have the engine return log-probs after temperature (SGLang: do not set
        SGLANG_RETURN_ORIGINAL_LOGPROB; vLLM: logprobs_mode=processed_logprobs).
    """,
)

# Standard errors. It is known already that temperatures differ; the sign tells in which way.
DECIDED = 3.0


def look(d: Diagnosis) -> Figures | None:
    """Finds log-ratios that depend on the probability, with means above what sampling allows."""
    need_tokens(d, FEWEST)
    log_ratio, above_1 = d.means.log_ratio, d.means.ratio_minus_one
    if not is_scaled(d) or min(log_ratio.z, above_1.z) < DECIDED:
        return None
    return {
        "mean": log_ratio.value,
        "ratio": 1 + above_1.value,
        "error": above_1.error,
        "explained": by_probability(d),
        "margin": margin(d),
        "explains": explained_by_temperature(d, d.of(BySurprise).sums[:, VALUES]),
    }
