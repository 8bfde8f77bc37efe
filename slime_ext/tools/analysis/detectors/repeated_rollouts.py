"""The finding ``repeated_rollouts``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    explains=False,
    what="rollout numbers appear again in one JSONL file after other numbers",
    asks="",
    title="""
        The lines of {{ rollouts | length }} rollout{{ "s" if rollouts | length > 1 }} are not
        together: their numbers appear again after others.
    """,
    evidence="""
        {{ "Rollouts" if rollouts | length > 1 else "Rollout" }} {{ rollouts[:10] | join(", ") }} {{-
        ", ..." if rollouts | length > 10 }} came before in the same file, with other rollouts
        between. Each stretch of lines counts as a separate rollout.
    """,
    threshold="one number that appears again",
    ruled_out="Several runs, because each file is read as a separate run.",
    fix="""
        Write one file for each run, with its lines ordered by rollout_id. If one file holds two runs,
        or a run and its restart, trends over rollouts are meaningless.
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds rollout numbers that appear again in a file after other numbers."""
    again = tuple(sorted(set(d.statistics.again)))
    return {"rollouts": again} if again else None
