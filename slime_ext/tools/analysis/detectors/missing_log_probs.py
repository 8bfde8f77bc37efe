"""The finding ``missing_log_probs``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures
from slime_ext.tools.analysis.detectors.shared.log_probs import Recorded, sentinels
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    explains=False,
    what="responses have no log-prob of the sampler at all",
    asks="",
    title="""
        {% if silent == sequences %}All log-probs of the sampler are NaN or infinite. {%- else %}Some
        responses have no log-probs of the sampler at all.{% endif %}
    """,
    evidence="""
        {{ silent }} of {{ sequences }} sequences have none. {%- if sentinels %} {{ sentinels }}
        tokens have a number of -1000 or less, mostly {{ "%g" | format(sentinel) }}.{% endif %}
    """,
    threshold="one response without any log-prob of the sampler",
    ruled_out="Responses that lack only some log-probs, because those are another finding, nan_log_probs.",
    fix="""
        Check that the custom generate function copies output_token_logprobs into
        sample.rollout_log_probs, and that the request asks for them (return_logprob). Without them
        these samples cannot be corrected.
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds responses without any log-prob of the sampler."""
    silent = d.of(Recorded).silent
    return {"silent": silent, "sequences": int(d.sums.sequences), **sentinels(d)} if silent else None
