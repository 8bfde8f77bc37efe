"""The finding ``equal_reference``."""

from __future__ import annotations

from dataclasses import field
from typing import NamedTuple

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout

FEWEST, EQUAL = 100, 0.99  # tokens of a rollout; share of them


class Unmoved(NamedTuple):
    """The share of a rollout's tokens whose log-prob is that of the first policy, bit by bit."""

    rollout_id: int
    share: float


class Reference(Measure):
    """The share of each rollout of 100 tokens that holds log-probs of the first policy."""

    rollouts: list[Unmoved] = field(default_factory=list)

    def close(self, rollout: DumpedRollout) -> None:
        if rollout.reference is None:
            return
        known = rollout.finite & rollout.reference.isfinite()
        equal = known & (rollout.proximal == rollout.reference) & (rollout.proximal != 0)
        if int(rollout.finite.sum()) >= FEWEST and known.any():
            self.rollouts.append(Unmoved(rollout.rollout_id, float(equal.sum()) / float(known.sum())))


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


def look(d: Diagnosis) -> Figures | None:
    """Finds that log_probs equal ref_log_probs in every rollout after the first."""
    later = [s for s in d.rollouts if s.rollout_id > 0 and s.tokens >= FEWEST]
    known = sorted(s for s in d.of(Reference).rollouts if s.rollout_id > 0)
    need(len(known) >= 2, "ref_log_probs of 2 rollouts after the first (slime: --use-kl-loss)")
    if any(s.share < EQUAL for s in known):
        return None
    equal = min(s.share for s in known)
    ids = tuple(s.rollout_id for s in known)
    return {"count": len(known), "every": len(later), "equal": equal, "rollouts": ids}
