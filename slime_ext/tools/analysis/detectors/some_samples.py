"""The finding ``some_samples``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, Untold, need
from slime_ext.tools.analysis.detectors.shared.explained import explained_by_tokens
from slime_ext.tools.analysis.detectors.shared.kinds import part_of_samples
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="warning",
    side="either",  # a symptom
    says="symptom",
    after=("any cause",),
    what="a part of the samples is far off, and no label in the dump explains which",
    asks="20 samples",
    title="""
        {{ far | int }} of {{ samples | int }} samples are far off, the others agree, and the dump
        does not say why.
    """,
    evidence="""
        k3 is {{ k3 | nats }} in these and {{ rest | nats }} in the others, with hardly any sample
        between. They differ over all their tokens, not at a few.
    """,
    threshold="""
        two kinds of samples, 5.6 times apart relative to their certainty, with few between; the far
        ones hold 80% of k3
    """,
    ruled_out="""
        Single far tokens, because each token counts at most 0.2 nats here. Samples that are less
        certain, because their certainty is divided out.
    """,
    fix="""
        Record what made each sample, and analyse again: the finding will name the label that these
        samples share.
    """,
)
FEWEST = 20  # samples
UNTOLD = Untold(
    "what these samples share",
    "record the engine of each sample (meta_info of its answer in sample.metadata: engine_url, dp_rank), its "
    "attempts and its weight version",
)


def look(d: Diagnosis) -> Figures | None:
    """Finds two kinds of samples, of which the far ones are fewer or lie beside near ones."""
    samples = d.sums.sequences
    need(samples >= FEWEST, f"{FEWEST} samples")
    kinds = part_of_samples(d)
    if kinds is None:
        return None
    return {
        "far": kinds.far[0],
        "samples": samples,
        "k3": kinds.far[2] / kinds.far[1],
        "rest": kinds.near[2] / kinds.near[1],
        "explains": explained_by_tokens(d, *kinds.far[1:]),
        "or_else": ("part_of_run", "other_log_probs"),
        "untold": (UNTOLD,),
    }
