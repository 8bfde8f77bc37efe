"""The finding ``retokenised``."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.explained import explained_by_tokens
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.measures.shifts import FAR, moved_turns
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import tabulated, zeros


class Turns(Measure):
    """Numbers of turns, of turns of which only a later part is shifted, and of samples with other tokens.

    ``far`` is the number and sum of k3 of the tokens in turns that are FAR off, [2].
    """

    takes_joined: ClassVar[bool] = True
    version: ClassVar[int] = 2

    turns: int = 0
    moved: int = 0
    retold: int = 0
    far: Tensor = field(default_factory=lambda: zeros(2))

    def add(self, part: DumpedRollout) -> None:
        self.turns += int(part.segments.turn_ids[-1:].sum())
        if len(_far_turns(part)):
            for one in part.rollouts:
                self.moved += moved_turns(one)
                self.far += _far_turns(one).sum(0)

    def close(self, rollout: DumpedRollout) -> None:
        self.retold += rollout.retold


def _far_turns(part: DumpedRollout) -> Tensor:
    """Returns the number of tokens and the sum of k3 of each turn that is FAR off, [turns, 2]."""
    if not part.size:
        return zeros(0, 2)
    rows = [part.columns[i] for i in (0, 1, 5)]
    turns = tabulated(part.segments.turn_ids, rows, int(part.segments.turn_ids[-1]) + 1)
    return turns[turns[:, 1] > FAR * turns[:, 0]][:, [0, 2]]


DETECTOR = Detector(
    severity="error",
    side="altered",
    group="spoilt",
    after=("other_run",),
    what="""
        a turn was decoded and encoded again, so that from some token on log-probs belong to
        neighbouring tokens
    """,
    asks="3 turns",
    title="The trained tokens are not the sampled ones: text was tokenised again.",
    evidence="""
        In {{ moved }} of {{ turns }} turns ({{ moved | share(turns) }}) the log-probs match their
        tokens at first, and later match tokens one or two positions away.{% if retold %} {{ retold }}
        samples have different tokens in the train dump and the rollout dump.{% endif %}
    """,
    threshold="""
        3 turns and 2% of all, each with a later part of at least 6 tokens that fits better when it is
        shifted, by 2.5 standard errors; or one sample with different tokens in the two dumps
    """,
    ruled_out="""
        A wrong slice of the engine's lists (off_by_one), because it shifts a response from its first
        token on, and here an earlier part of the same sample fits the recorded log-probs.
    """,
    fix="""
        Do not decode a turn and encode its text again. Append the ids that the engine returned
        (SGLang: output_ids or output_token_logprobs; vLLM: return_token_ids), and join the prompts of
        later turns from ids.
    """,
)

MOVED, MOVED_SHARE = 3, 0.02  # turns with a shifted later part; their share


def look(d: Diagnosis) -> Figures | None:
    """Finds turns with a shifted later part, or samples with different tokens in the two dumps."""
    counted = d.of(Turns)
    need(counted.turns >= MOVED, f"{MOVED} turns of responses")
    if counted.moved < max(MOVED, MOVED_SHARE * counted.turns) and not counted.retold:
        return None
    return {**vars(counted), "explains": explained_by_tokens(d, *counted.far.tolist())}
