"""The finding ``route_lengths``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    explains=False,
    what="the sampler's experts are of more or fewer tokens than their sample",
    asks="rollout_routed_experts",
    title="The recorded experts do not fit their samples: they are of another number of tokens.",
    evidence="""
        In {{ misfit }} of {{ routed }} samples with experts ({{ misfit | share(routed) }}): a sample of
        T tokens has T - 1 rows.
    """,
    threshold="one sample",
    ruled_out="A layout with a row for every token (T rows): it counts as fitting.",
    fix="""
        Cut the experts where the sample is cut (radixark/miles#861: a sample that was truncated kept
        those of the longer one). Replayed as they are, every row behind the cut is another token's:
        replay is no remedy before that.
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds samples whose experts have another length."""
    counts = d.statistics.counts
    need(counts["routed"], "the sampler's experts (slime, miles: --use-rollout-routing-replay)")
    return {"misfit": counts["misfit"], "routed": counts["routed"]} if counts["misfit"] else None
