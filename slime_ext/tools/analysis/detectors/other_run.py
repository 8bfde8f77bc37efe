"""The finding ``other_run``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout


class Paired(Measure):
    """Samples that have log-probs of the sampler in both dumps; those of ``foreign`` differ."""

    paired: int = 0
    foreign: int = 0

    def close(self, rollout: DumpedRollout) -> None:
        self.paired += rollout.paired
        self.foreign += rollout.foreign


DETECTOR = Detector(
    severity="error",
    side="altered",
    group="spoilt",
    what="the train dumps and the rollout dumps belong to different runs",
    asks="train and rollout dumps with log-probs of the sampler",
    title="The train dumps and the rollout dumps belong to different runs.",
    evidence="""
        In {{ foreign }} of {{ paired }} samples ({{ foreign | share(paired) }}) the first log-probs
        of the sampler differ between the train dump and the rollout dump.
    """,
    threshold="in half of the samples, one of the first four log-probs differs by 1e-3 nats",
    ruled_out="""
        Text that was tokenised again, because it changes tokens only from some position on, and the
        train dump still copies what the engine recorded.
    """,
    fix="""
        Analyse two folders of the same run. A restart that wrote into the same folder leaves files of
        both runs, and --save-debug-rollout-data and --save-debug-train-data may point to different
        folders.
    """,
)

OTHERS = 0.5  # share of the samples that both dumps hold


def look(d: Diagnosis) -> Figures | None:
    """Finds that the two dumps have different log-probs of the sampler for most samples."""
    paired, foreign = d.of(Paired).paired, d.of(Paired).foreign
    need(paired, "rollout dumps and train dumps that both hold rollout_log_probs")
    return {"foreign": foreign, "paired": paired} if foreign > OTHERS * paired else None
