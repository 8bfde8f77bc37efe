"""The finding ``missing_log_probs``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures
from slime_ext.tools.analysis.detectors.shared.log_probs import sentinels
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    explains=False,
    what="responses without any log-prob of the sampler",
    asks="",
    title="""
        {% if silent == sequences %}All log-probs of the sampler are NaN or infinite. {%- else %}Some
        responses have no log-probs of the sampler at all.{% endif %}
    """,
    evidence="""
        {{ silent }} of {{ sequences }} sequences have none. {%- if sentinels %} {{ sentinels }} tokens
        have a number of -1000 or less, mostly {{ "%g" | format(sentinel) }}.{% endif %}
    """,
    threshold="one response without any",
    ruled_out="A response in which some are missing is another finding, nan_log_probs.",
    fix="""
        A custom generate function that does not copy output_token_logprobs into sample.rollout_log_probs,
        or a request without return_logprob. Without them these samples cannot be corrected.
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds responses without any log-prob of the sampler."""
    silent = d.statistics.counts["silent"]
    return {"silent": silent, "sequences": int(d.sums["sequences"]), **sentinels(d)} if silent else None
