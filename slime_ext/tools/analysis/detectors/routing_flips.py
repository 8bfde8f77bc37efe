"""The finding ``routing_flips``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.experts import has_experts
from slime_ext.tools.analysis.detectors.shared.sparse import NAMED, sparse
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="warning",
    side="honest",
    after=NAMED,
    what="""
        a few tokens of a mixture of experts are far off, in both directions, and share nothing:
        routing flips
    """,
    asks="a model that is known to have experts (args.json, rollout_routed_experts)",
    title="A few tokens are far off in both directions while all others agree: the routing of experts flips.",
    evidence="""
        1% of the tokens hold {{ held | share(1) }} of the squared log-ratio ({{ far | nats }} each,
        root mean square), and the median token is off by {{ size | nats }}. Extremes are {{ "%+.3g" |
        format(lowest) }} and {{ "%+.3g" | format(highest) }}. The model has experts.
    """,
    threshold="""
        1% of the tokens hold 75% of the squared log-ratio, at least a tenth of it on either side of
        0, and the median |log-ratio| is below 0.02 nats
    """,
    ruled_out="""
        A common cause, because the far tokens share no value, no position at the end of responses, no
        token id, no sample, engine or rank. It is still a guess: if the dump has the experts of both
        sides, expert_routing decides.
    """,
    remedy="replay the sampler's experts in the trainer (--use-rollout-routing-replay)",
    fix="""
        Replay the sampler's routing in the trainer (slime: --use-rollout-routing-replay), or compute
        the router in float32 on both sides (--moe-router-dtype fp32), and see whether the far tokens
        disappear.
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds a few far tokens of both signs in a model with experts."""
    figures = sparse(d)
    need(
        figures is None or has_experts(d) is not None,
        "whether the model has experts (args.json beside the dumps)",
    )
    return figures if figures and figures["is_both"] and has_experts(d) else None
