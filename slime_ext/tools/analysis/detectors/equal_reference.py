"""The finding ``equal_reference``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="warning",
    explains=False,
    what="the trainer's log-probs equal those of the first policy, bit by bit, after training began",
    asks="ref_log_probs, 3 rollouts",
    title="""
        The trainer's log-probs equal those of the reference policy, bit by bit, in rollout {{
        rollouts[0] }} and later.
    """,
    evidence="""
        They are equal at {{ equal | share(1) }} or more of the tokens in {{ count }} of {{ every }}
        rollouts after the first.
    """,
    threshold="99% of the tokens of every rollout after rollout 0, in 2 rollouts of 100 tokens",
    ruled_out="""
        A policy that has not moved yet, because rollout 0 is left out. Rounding, because it never
        makes all tokens equal.
    """,
    fix="""
        Either one list is a copy of the other (the reference model was loaded over the trainer's, or
        its forward pass is used for both), or the weights do not move. In that case check the
        learning rate, the gradient norm and frozen parameters.
    """,
)
FEWEST, EQUAL = 100, 0.99


def look(d: Diagnosis) -> Figures | None:
    """Finds that log_probs equal ref_log_probs in every rollout after the first."""
    later = [s for s in d.statistics.rollouts if s.rollout_id > 0 and s.tokens >= FEWEST]
    known = [s for s in later if s.moved is not None]
    need(len(known) >= 2, "ref_log_probs of 2 rollouts after the first (slime: --use-kl-loss)")
    if any(s.equal < EQUAL for s in known):
        return None
    equal = min(s.equal for s in known)
    ids = tuple(s.rollout_id for s in known)
    return {"count": len(known), "every": len(later), "equal": equal, "rollouts": ids}
