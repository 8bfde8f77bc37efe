"""Defines a measure: what a detector adds up over a run."""

from __future__ import annotations

from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import Additive


class Measure(Additive):
    """Sums over a run, as a dataclass whose fields add up over parts, rollouts and processes.

    A measure that one detector reads is in that detector's file. A measure that several detectors read is in
    ``detectors/shared``. ``Detector.reads`` names both, and ``Diagnosis.of`` returns them.
    """

    def add(self, part: DumpedRollout) -> None:
        """Adds a part of a rollout: some of its samples."""

    def close(self, rollout: DumpedRollout) -> None:
        """Adds what only the whole rollout tells. It is called once, after all parts were added."""
