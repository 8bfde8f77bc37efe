"""The finding ``left_out``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout


class Read(Measure):
    """Numbers of samples that could be read, and that could not."""

    samples: int = 0
    left_out: int = 0

    def close(self, rollout: DumpedRollout) -> None:
        self.samples += rollout.count
        self.left_out += rollout.left_out


DETECTOR = Detector(
    severity="warning",
    explains=False,
    what="a part of the samples or of the files could not be read, so shares are of the others",
    asks="",
    title="""
        {% if out %}{{ out | share(samples) }} of the samples could not be read {%- else %}Files could
        not be read{% endif %}, so all findings are about the others.
    """,
    evidence="""
        {% if out %}{{ out | int }} of {{ samples | int }} samples are left out{{ "; " if files }}{%
        endif %} {%- if files %}{{ files }} file{{ "s or parts of them" if files > 1 else " or part of
        one" }} could not be read{% endif %}. "Left out" in the report has the reasons.
    """,
    threshold="""
        1% of the samples, or as many files as a tenth of the rollouts (lines of JSONL are listed, not
        counted)
    """,
    ruled_out="Samples that the trainer dropped, because those are another finding, selection_bias.",
    fix="""
        Read the reasons. If a list has another length than the response, a custom generate function
        appends to one list and not to the other. If files are cut off, the disk was full or the run
        was killed.
    """,
)

LEFT_OUT = 0.01  # share of the samples
UNREAD = 0.1  # share of the rollouts


def look(d: Diagnosis) -> Figures | None:
    """Finds that a part of the samples, or of the files, could not be read."""
    out, read = d.of(Read).left_out, d.of(Read).samples
    is_much = out >= max(1, LEFT_OUT * (out + read)) or d.unread >= max(1, UNREAD * len(d.timeline))
    return {"out": out, "samples": out + read, "files": d.unread} if is_much else None
