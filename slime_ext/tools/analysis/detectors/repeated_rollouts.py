"""The finding ``repeated_rollouts``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    explains=False,
    what="rollout numbers repeat in one JSONL file",
    asks="",
    title="Rollout numbers come back: the lines of {{ rollouts | length }} of them are not together.",
    evidence="""
        {{ "Rollouts" if rollouts | length > 1 else "Rollout" }} {{ rollouts[:10] | join(", ") }} {{- ",
        ..." if rollouts | length > 10 }} came before in the same file, with others between: each stretch
        of lines is counted as a rollout of its own.
    """,
    threshold="one number that comes back",
    ruled_out="Several runs: their files are read as runs of their own.",
    fix="""
        Write one file for each run, its lines ordered by rollout_id: two runs, or a run and its restart,
        in one file make a trend of whatever order the lines have.
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds rollout numbers that come back in a file after others."""
    again = tuple(sorted(set(d.statistics.again)))
    return {"rollouts": again} if again else None
