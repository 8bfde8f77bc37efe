"""The finding ``routing_flips``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.experts import has_experts
from slime_ext.tools.analysis.detectors.shared.sparse import NAMED, sparse
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="warning",
    after=NAMED,
    what="""
        a few tokens of a mixture of experts are far off, in both directions, and share nothing: routing
        that flips
    """,
    asks="a model that is known to have experts (args.json, rollout_routed_experts)",
    title="""
        A few tokens are far off in both directions while all others agree: routing of experts that
        flips.
    """,
    evidence="""
        1% of the tokens hold {{ held | share(1) }} of the squared log-ratio ({{ far | nats }} each, in
        the quadratic mean); the median token is off by {{ size | nats }}. Extremes {{ "%+.3g" |
        format(lowest) }} and {{ "%+.3g" | format(highest) }}. The model has experts.
    """,
    threshold="""
        1% of the tokens hold 75% of the squared log-ratio, a tenth of it on either side of 0, the
        median below 0.02
    """,
    ruled_out="""
        The far tokens share no value, no place at the end of responses, no token id, no sample, engine
        or rank. A guess all the same: with the experts of both sides in the dump it is expert_routing.
    """,
    fix="""
        Replay the sampler's routing in the trainer (slime: --use-rollout-routing-replay), or compute
        the router in float32 on both sides (--moe-router-dtype fp32), and see whether it goes.
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds a sparse distance of both signs on a model with experts."""
    found = sparse(d)
    need(
        found is None or has_experts(d) is not None,
        "whether the model has experts (args.json beside the dumps)",
    )
    return found if found and found["is_both"] and has_experts(d) else None
