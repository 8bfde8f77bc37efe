"""The finding ``equal_columns``."""

from __future__ import annotations

from collections.abc import Sequence

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.rollouts import RolloutSummary

DETECTOR = Detector(
    severity="warning",
    # Misplaced log-probs make the other rollouts differ, though both sides compute alike.
    after=("other_run", "positive_log_probs", "greedy_sampling", "other_log_probs", "permuted_log_probs"),
    explains=False,
    what="both sides' log-probs are bitwise equal: one is a copy, or both are computed alike",
    asks="100 tokens",
    title="""
        {% if equal == every %}The log-probs of both sides are the same, bit by bit. {%- else %}In {{
        equal }} of {{ every }} rollouts the log-probs of both sides are the same, bit by bit.{% endif
        %}
    """,
    evidence="""
        They are equal at all {{ tokens }} response tokens{{ "" if equal == every else " of these
        rollouts" }}.
    """,
    threshold="""
        a rollout of 100 tokens in which every log-ratio is exactly 0, while most are not 0 in another
        rollout, if there is one
    """,
    ruled_out="""
        {% if equal == every -%} Nothing, because sampler and trainer may compute bitwise alike
        (slime: --true-on-policy-mode). Any other pair of engines differs in the last bits. {%- else
        -%} Sides that compute bitwise alike, because in another rollout they differ at most tokens.
        {%- endif %}
    """,
    fix="""
        Unless both sides are meant to be bitwise equal, one column is a copy of the other. Either the
        trainer used the sampler's log-probs (slime: --use-rollout-logprobs), or a script wrote one
        list under both names. The mismatch is then unknown: let the trainer score the tokens
        (--get-mismatch-metrics).
    """,
)

EQUAL_TOKENS = 100  # tokens
ALIKE = 1e-6  # nats, mean |l|; below it whole rollouts may be equal by chance


def look(d: Diagnosis) -> Figures | None:
    """Finds rollouts in which the log-probs of both sides are equal, bit by bit."""
    need_tokens(d, EQUAL_TOKENS)
    equal = tuple(s.rollout_id for s in d.rollouts if not s.absolute and s.surprise)
    tokens = sum(s.tokens for s in d.rollouts if s.rollout_id in equal)
    every, others = len(d.rollouts), [s for s in d.rollouts if s.absolute]
    if tokens < EQUAL_TOKENS or (others and _equal_by_chance(others)):
        return None
    # Two engines may be meant to be bitwise equal. With a lag, they are so only in rollout 0.
    severity = "note" if len(equal) == every or equal == (0,) else "warning"
    return {"tokens": tokens, "equal": len(equal), "every": every, "rollouts": equal, "severity": severity}


def _equal_by_chance(others: Sequence[RolloutSummary]) -> bool:
    """Returns whether other rollouts differ so little that some may be equal by chance."""
    return max(s.absolute for s in others) < ALIKE or not any(s.median for s in others)
