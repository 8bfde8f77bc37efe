"""The finding ``positive_log_probs``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures
from slime_ext.tools.analysis.detectors.shared.log_probs import Recorded
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    side="altered",
    group="spoilt",
    what="recorded log-probs are above 0",
    asks="",
    title="Some values recorded as the sampler's log-probs are above 0.",
    evidence="These are {{ count }} response tokens ({{ count | share(tokens) }}).",
    threshold="one value above 1e-4, which arithmetic alone does not reach",
    ruled_out="Rounding, because a log-softmax in any dtype stays below 1e-4.",
    fix="""
        Log-probs cannot be positive, so probabilities, logits or negated log-probs were recorded.
        Record the log-softmax at the sampled token.
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds log-probs of the sampler above 0."""
    count = d.of(Recorded).positive
    return {"count": count, "tokens": d.sums.tokens} if count else None
