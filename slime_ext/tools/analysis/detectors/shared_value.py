"""The finding ``shared_value``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    group="spoilt",
    after=(
        "positive_log_probs",
        "retokenised",
        "off_by_one",
        "greedy_sampling",
        "tool_tokens",
        "constrained_decoding",
    ),
    what="log-probs of sampled tokens were lost and replaced by one value",
    asks="4 such tokens",
    title="""
        {{ count }} sampled tokens have the same log-prob, {{ "%g" | format(value) }}: it was filled
        in, not recorded.
    """,
    evidence="""
        {% if ids > 1 %}At least {{ ids }} different tokens{% else %}Tokens{% endif %} have exactly {{
        "%g" | format(value) }}. They hold {{ held | share(1) }} of the squared log-ratio of all
        tokens that are far off. {%- if last %} {{ last | share(1) }} of the run's squared log-ratio
        lies at the last token of responses.{% endif %}
    """,
    threshold="""
        one value at 4 tokens with 3 different ids (or 0 at the last token of responses) holds half of
        the squared log-ratio of tokens beyond 0.5 nats
    """,
    ruled_out="""
        Routing, numerics or old weights, because none of them gives different tokens the same
        log-prob to the last bit. Tool output, because the trainer finds these tokens as likely as
        sampled ones.
    """,
    fix="""
        {%- if value == 0 %} Look for `logprob or 0.0`, for accepted draft tokens of speculative
        decoding that come back without a log-prob, and for an end token that is appended by hand. {%-
        else %} Look for a clamp, or for a default that replaces a missing log-prob of the engine. {%-
        endif %} Record the engine's number, or mask these tokens until you have it.
    """,
)
FEWEST, KINDS, HELD = 4, 3, 0.5  # tokens; their ids; share of sum l^2 of far tokens
LAST = 0.5  # share of sum l^2 at the last tokens from which the finding says so


def look(d: Diagnosis) -> Figures | None:
    """Finds one log-prob that many far tokens share, and that holds most of their squared log-ratio."""
    need_tokens(d, FEWEST)
    shared = d.statistics.shared
    if not shared.values:
        return None
    value = max(shared.value_squares, key=shared.value_squares.__getitem__)
    count, ids, far = shared.values[value], shared.fewest_ids(value), float(shared.signs[:, 3].sum())
    held = shared.value_squares[value] / far if far else 0.0
    last = float(shared.ends[:, 0, 3].sum()) / float(shared.total[3])
    is_end = float(value) == 0 and last >= LAST  # an end token that was appended has one id
    if count < FEWEST or held < HELD or (ids < KINDS and not is_end):
        return None
    return {
        "value": float(value),
        "count": count,
        "ids": ids,
        "held": held,
        "last": last if last >= LAST else 0,
    }
