"""The finding ``sparse``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, Untold
from slime_ext.tools.analysis.detectors.shared.experts import has_experts
from slime_ext.tools.analysis.detectors.shared.sparse import NAMED, sparse
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="warning",
    side="either",  # a symptom
    says="symptom",
    after=(*NAMED, "routing_flips", "some_prompts"),
    what="a few tokens are far off and all others agree; the dump does not hold what they share",
    asks="300 tokens",
    title="""
        A few tokens are far off {%- if is_both %} in both directions{% else %}, in one direction{%
        endif %}, and all others agree. The dump does not hold what they share.
    """,
    evidence="""
        1% of the tokens hold {{ held | share(1) }} of the squared log-ratio ({{ far | nats }} each,
        root mean square), and the median token is off by {{ size | nats }}. Extremes are {{ "%+.3g" |
        format(lowest) }} and {{ "%+.3g" | format(highest) }}.
    """,
    threshold="""
        1% of the tokens hold 75% of the squared log-ratio, and the median |log-ratio| is below 0.02
        nats
    """,
    ruled_out="""
        Noise of low precision, because it would affect all tokens. A common cause, because the far
        tokens share no value, no position at the end of responses, no token id, no sample, engine or
        rank.
    """,
    fix="""
        {%- if is_broken %} Find what wrote these numbers, because no softmax makes a log-ratio beyond
        50 nats at a sampled token. Read the worst tokens, and mask them until then. {%- elif is_both
        %} Read the worst tokens. If the model has experts, record the sampler's experts
        (--use-rollout-routing-replay) and analyse again. If it is dense, score the samples again: if
        a token is far off again, a kernel is the cause; if not, memory or a race is. {%- elif
        is_below %} The sampler was surer than the trainer. Look at the worst tokens for a grammar,
        banned tokens or a list of choices, and sample one rollout without them. {%- else %} The
        trainer is surer than the sampler. Look at the worst tokens for log-probs that belong to
        another token, or that were clamped at a lowest value. {%- endif %}
    """,
)
BROKEN = 50.0  # nats, |l| that no softmax makes at a sampled token
UNTOLD = Untold(
    "whether the model has experts",
    "record the sampler's experts (--use-rollout-routing-replay), or put args.json of a dense model beside "
    "the dump",
)


def look(d: Diagnosis) -> Figures | None:
    """Finds a few far tokens whose cause the dump does not tell."""
    figures = sparse(d)
    if figures is None:
        return None
    is_broken = max(-figures["lowest"], figures["highest"]) > BROKEN
    figures = {**figures, "is_broken": is_broken}
    if is_broken or not figures["is_both"] or has_experts(d) is False:
        return figures
    return figures | {"or_else": ("routing_flips",), "untold": (UNTOLD,)}
