"""The finding ``route_lengths``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.experts import Routing
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout


class Misfits(Measure):
    """Number of samples whose experts belong to more or fewer tokens."""

    samples: int = 0

    def close(self, rollout: DumpedRollout) -> None:
        self.samples += rollout.routing.get("misfit", 0)


DETECTOR = Detector(
    severity="error",
    side="either",  # no ratio shows it
    explains=False,
    what="the sampler's experts have more or fewer rows than their sample has tokens",
    asks="rollout_routed_experts",
    title="The recorded experts do not fit their samples: they belong to another number of tokens.",
    evidence="""
        The number of rows is wrong in {{ misfit }} of {{ routed }} samples with experts ({{ misfit |
        share(routed) }}). A sample of T tokens should have T - 1 rows.
    """,
    threshold="one sample",
    ruled_out="A layout with a row for every token (T rows), because it counts as fitting.",
    fix="""
        Cut the experts where the sample is cut (in radixark/miles#861 a truncated sample kept those
        of the longer one). Otherwise every row after the cut belongs to another token, and replay is
        no remedy.
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds samples whose experts belong to another number of tokens."""
    routed, misfits = d.of(Routing).routed, d.of(Misfits).samples
    need(routed, "the sampler's experts (slime, miles: --use-rollout-routing-replay)")
    return {"misfit": misfits, "routed": routed} if misfits else None
