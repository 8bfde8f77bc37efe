"""The finding ``no_response_tokens``."""

from __future__ import annotations

from dataclasses import field

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import any_true


class Blank(Measure):
    """Rollouts without a response token of mask 1; ``empty`` are those without any response token."""

    numbers: list[int] = field(default_factory=list)
    empty: int = 0

    def close(self, rollout: DumpedRollout) -> None:
        if not any_true(rollout.mask):
            self.numbers.append(rollout.rollout_id)
            self.empty += not rollout.size


DETECTOR = Detector(
    severity="error",
    explains=False,
    what="every token of a rollout is masked, or every response is empty",
    asks="",
    title="""
        {% if blank == every %}{{ why | capitalize }}, so nothing is trained on and nothing can be
        compared. {%- else %}In {{ blank }} rollout{{ "s" if blank > 1 }} {{ why }}, so nothing in them
        is trained on. {%- endif %}
    """,
    evidence="In {{ blank }} of {{ every }} rollouts {{ shows }}.",
    threshold="one rollout without a response token of mask 1",
    ruled_out="A rejection that masks samples, because it leaves some tokens of a rollout.",
    fix="""
        {% if empty %}Look for aborted requests in the logs of the engines, and check the stop tokens and
        --rollout-max-response-len. {% endif %}
        {% if empty < blank %}Check where the custom generate or reward function sets sample.loss_mask,
        and check remove_sample and filters. A mask of the prompt's length, an inverted mask, or a mask
        of failed samples alone trains on nothing. {%- endif %}
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds rollouts in which every token is masked, or every response is empty."""
    blank, empty = tuple(sorted(d.of(Blank).numbers)), d.of(Blank).empty
    if not blank:
        return None
    masked = len(blank) - empty
    why = ["every token is masked"] * bool(masked) + ["every response is empty"] * bool(empty)
    shows = ["loss_mask is 0 at every response token"] * bool(masked)
    shows += ["no response has a token"] * bool(empty)
    texts = {"why": " or ".join(why), "shows": ", or ".join(shows)}
    return {"rollouts": blank, "blank": len(blank), "empty": empty, "every": len(d.timeline)} | texts
