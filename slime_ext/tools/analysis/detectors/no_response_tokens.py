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
        {% if blank == every %}Every token is masked: nothing is trained on, and nothing can be compared.
        {%- else %}In {{ blank }} rollout{{ "s" if blank > 1 }} every token is masked: nothing of them is
        trained on. {%- endif %}
    """,
    evidence="In {{ blank }} of {{ every }} rollouts loss_mask is 0 at every response token.",
    threshold="one rollout without a response token of mask 1",
    ruled_out="A rejection that masks samples: it leaves some tokens of a rollout.",
    fix="""
        Look where sample.loss_mask is made in the custom generate or reward function, and at
        remove_sample and filters: a mask of the prompt's length, inverted, or of failed samples alone
        trains on nothing.
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds rollouts in which every token is masked."""
    blank = tuple(sorted(d.statistics.blank))
    return {"rollouts": blank, "blank": len(blank), "every": len(d.timeline)} if blank else None
