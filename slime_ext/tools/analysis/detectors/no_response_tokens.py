"""The finding ``no_response_tokens``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    explains=False,
    what="every token of a rollout is masked",
    asks="",
    title="""
        {% if blank == every %}Every token is masked, so nothing is trained on and nothing can be
        compared. {%- else %}In {{ blank }} rollout{{ "s" if blank > 1 }} every token is masked, so
        nothing in them is trained on. {%- endif %}
    """,
    evidence="In {{ blank }} of {{ every }} rollouts loss_mask is 0 at every response token.",
    threshold="one rollout without a response token of mask 1",
    ruled_out="A rejection that masks samples, because it leaves some tokens of a rollout.",
    fix="""
        Check where the custom generate or reward function sets sample.loss_mask, and check
        remove_sample and filters. A mask of the prompt's length, an inverted mask, or a mask of
        failed samples alone trains on nothing.
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds rollouts in which every token is masked."""
    blank = tuple(sorted(d.statistics.blank))
    return {"rollouts": blank, "blank": len(blank), "every": len(d.timeline)} if blank else None
