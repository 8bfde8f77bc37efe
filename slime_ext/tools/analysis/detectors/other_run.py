"""The finding ``other_run``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    group="spoilt",
    what="the train dumps are not of the run that the rollout dumps are of",
    asks="both with log-probs of the sampler",
    title="The train dumps are not of the run that the rollout dumps are of.",
    evidence="""
        Of {{ foreign }} of {{ paired }} samples ({{ foreign | share(paired) }}) the sampler's log-probs
        begin otherwise in the train dump than in the rollout dump.
    """,
    threshold="half of the samples, of which one of the first four log-probs differs by 1e-3 nats",
    ruled_out="""
        Text that was tokenised again: it changes tokens from some place on, and the train dump still has
        a copy of what the engine recorded.
    """,
    fix="""
        Give the two folders of one run: a restart that wrote into the same folder leaves files of both,
        and --save-debug-rollout-data and --save-debug-train-data may point to different places.
    """,
)

OTHERS = 0.5  # share of the samples that both dumps hold


def look(d: Diagnosis) -> Figures | None:
    """Finds that the sampler's log-probs of most samples begin otherwise in the train dump than in the
    rollout dump."""
    paired, foreign = d.statistics.counts["paired"], d.statistics.counts["foreign"]
    need(paired, "rollout dumps and train dumps that both hold rollout_log_probs")
    return {"foreign": foreign, "paired": paired} if foreign > OTHERS * paired else None
