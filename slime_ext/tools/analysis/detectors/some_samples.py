"""The finding ``some_samples``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.kinds import two_kinds
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="warning",
    says="symptom",
    after=("any cause",),
    what="a part of the samples is far off, and no label in the dump tells which",
    asks="20 samples",
    title="""
        {{ far | int }} of {{ samples | int }} samples are far off, the others agree, and the dump does
        not say why these.
    """,
    evidence="""
        k3 {{ k3 | nats }} in these, {{ rest | nats }} in the others; hardly any sample lies between.
        They differ over all their tokens, not at a few.
    """,
    threshold="""
        two kinds of samples, 5 times apart for their certainty, with few between; the far ones hold 80%
        of k3
    """,
    ruled_out="""
        Single tokens far off: they do not move a sample here. Samples that are less certain: that is
        divided out.
    """,
    fix="""
        Record what made each sample: the engine (meta_info of its answer in sample.metadata:
        engine_url, dp_rank), attempts, weight version. Then analyse again: the label that these samples
        share is named.
    """,
)
FEWEST = 20  # samples
UNTOLD = "the engine and the attempt of each sample"


def look(d: Diagnosis) -> Figures | None:
    """Finds two kinds of samples, of which the far ones are fewer."""
    samples = d.sums["sequences"]
    need(samples >= FEWEST, f"{FEWEST} samples")
    kinds = two_kinds(d)
    if kinds is None or kinds.far[0] > kinds.near[0]:
        return None
    return {
        "far": kinds.far[0],
        "samples": samples,
        "k3": kinds.far[2] / kinds.far[1],
        "rest": kinds.near[2] / kinds.near[1],
        "or_else": ("part_of_run", "other_log_probs"),
        "untold": UNTOLD,
    }
