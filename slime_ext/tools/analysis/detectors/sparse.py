"""The finding ``sparse``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures
from slime_ext.tools.analysis.detectors.shared.experts import has_experts
from slime_ext.tools.analysis.detectors.shared.sparse import NAMED, sparse
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="warning",
    says="symptom",
    after=(*NAMED, "routing_flips"),
    what="a few tokens are far off and all others agree; what they share is not in the dump",
    asks="300 tokens",
    title="""
        A few tokens are far off {%- if is_both %} in both directions{% else %}, in one direction{%
        endif %}, all others agree: what they share is not in the dump.
    """,
    evidence="""
        1% of the tokens hold {{ held | share(1) }} of the squared log-ratio ({{ far | nats }} each, in
        the quadratic mean); the median token is off by {{ size | nats }}. Extremes {{ "%+.3g" |
        format(lowest) }} and {{ "%+.3g" | format(highest) }}.
    """,
    threshold="1% of the tokens hold 75% of the squared log-ratio, the median below 0.02 nats",
    ruled_out="""
        Noise of low precision: it is spread over all tokens. The far tokens share no value, no place at
        the end of responses, no token id, no sample, engine or rank.
    """,
    fix="""
        {%- if is_broken %} Find what wrote these numbers: no softmax makes a log-ratio beyond 50 nats
        at a token that was sampled. Read the worst tokens, and mask them until then. {%- elif is_both
        %} Read the worst tokens. If the model has experts, record the sampler's
        (--use-rollout-routing-replay) and analyse again. If it is dense, score their samples again: a
        far token that comes back is a kernel, one that goes is memory or a race. {%- elif is_below %}
        The sampler was surer than the trainer: look at the worst tokens for a grammar, banned tokens or
        a list of choices, and sample one rollout without them. {%- else %} The trainer is surer than
        the sampler: look at the worst tokens for log-probs that belong to another token, or that were
        cut off at a lowest value. {%- endif %}
    """,
)
BROKEN = 50.0  # nats, |l| that no softmax makes at a token that was sampled
UNTOLD = "the sampler's experts in the dump (--use-rollout-routing-replay), or args.json of a dense model"


def look(d: Diagnosis) -> Figures | None:
    """Finds a sparse distance whose cause the dump does not tell."""
    found = sparse(d)
    if found is None:
        return None
    is_broken = max(-found["lowest"], found["highest"]) > BROKEN
    found = {**found, "is_broken": is_broken}
    if is_broken or not found["is_both"] or has_experts(d) is False:
        return found
    return found | {"or_else": ("routing_flips",), "untold": UNTOLD}
