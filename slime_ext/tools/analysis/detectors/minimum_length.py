"""The finding ``minimum_length``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.detectors.shared.explained import explained_by_tokens
from slime_ext.tools.analysis.detectors.shared.minimum import minimum
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    side="altered",
    group="other_policy",
    after=(
        "spoilt",
        "kept_mass",
        "constrained_decoding",
        "other_log_probs",
        "permuted_log_probs",
    ),
    what="the sampler may not end a response before a number of tokens (min_new_tokens), and renormalises",
    asks="300 tokens",
    title="""
        The sampler may not end a response before about {{ begin | int }} tokens (min_new_tokens),
        which the trainer does not know.
    """,
    evidence="""
        The mean log-ratio is {{ "%.3g" | format(near) }} nats up to there and {{ "%.2g" |
        format(rest) }} from there on, because up to there the sampler renormalises without the end
        token. No response {% if stopped %}that ends with the usual last token {% endif %}is shorter than {{
        shortest | int }} tokens. {%- if stopped %} Shorter ones ({{ stopped | int }} tokens) end with another
        token, as after a stop string, which still ends an answer below the minimum in SGLang.{% endif %}
    """,
    threshold="""
        mean log-ratio 5 times as far below 0 before the position as after it, by 6 standard errors;
        95% of the squared log-ratio of far tokens is below 0; no response with the usual last token
        ends before the position, and at most half of all; old weights do not explain the distance
    """,
    ruled_out="""
        Top-p or a temperature, because they do not stop at a position. Another text at the start,
        because its log-ratio has no preferred sign.
    """,
    remedy="remove min_new_tokens (min_tokens) from sampling_params",
    fix="""
        Remove min_new_tokens (min_tokens) from sampling_params, or mask the end token at these
        positions in the trainer.
    """,
)
FEWEST = 300  # tokens


def look(d: Diagnosis) -> Figures | None:
    """Finds a position before which mean l is below 0 and no response ends."""
    need_tokens(d, FEWEST)
    position = minimum(d)
    if position is None:
        return None
    return position._asdict() | {"explains": explained_by_tokens(d, position.tokens, position.k3)}
