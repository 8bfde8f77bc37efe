"""The finding ``repeated_rollouts``."""

from __future__ import annotations

from collections import Counter
from dataclasses import field

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout


class Returned(Measure):
    """Rollouts whose number came before in the same file, with other numbers between."""

    numbers: list[int] = field(default_factory=list)

    def close(self, rollout: DumpedRollout) -> None:
        self.numbers += [rollout.rollout_id] * rollout.is_repeated


DETECTOR = Detector(
    severity="error",
    explains=False,
    what="rollout numbers appear again in a JSONL file after other numbers, or in several files",
    asks="",
    title="""
        The lines of {{ rollouts | length }} rollout{{ "s" if rollouts | length > 1 }} are not
        together: their numbers appear again {{ "in another file" if is_in_files else "after others" }}.
    """,
    evidence="""
        {{ "Rollouts" if rollouts | length > 1 else "Rollout" }} {{ rollouts[:10] | join(", ") }} {{-
        ", ..." if rollouts | length > 10 }} came before in {% if is_in_files %}another
        file.{% else %}the same file, with other rollouts between.{% endif %} Each stretch of lines
        counts as a separate rollout.
    """,
    threshold="one number that appears again",
    ruled_out="Nothing yet: several runs, a restart and lines out of order look alike.",
    fix="""
        Write one file for each run, with its lines ordered by rollout_id. If these are two runs, or a
        run and its restart, trends over rollouts are meaningless: analyse one, with --against before
        the other.
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds rollout numbers that appear again in a file after other numbers, or in several files."""
    returned = set(d.of(Returned).numbers)
    counted = Counter(moment.rollout_id for moment in d.timeline)
    in_files = {number for number, count in counted.items() if count > 1} - returned
    rollouts = tuple(sorted(returned | in_files))
    return {"rollouts": rollouts, "is_in_files": bool(in_files)} if rollouts else None
