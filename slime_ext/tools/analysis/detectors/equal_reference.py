"""The finding ``equal_reference``."""

from __future__ import annotations

from collections.abc import Sequence
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
        {% if before is defined %}The reference policy was replaced by the trainer's in rollout {{ rollouts[0]
        }}. {%- else %}The trainer's log-probs equal those of the reference policy, bit by bit, in rollout {{
        rollouts[0] }} and later.{% endif %}
    """,
    evidence="""
        {% if before is defined %}The log-probs of both are equal, bit by bit, at {{ equal | share(1) }} of
        the tokens of rollout {{ rollouts | join(", ") }}, but at {{ differ | share(1) }} in rollout {{ before
        }}. {%- else %}They are equal at {{ equal | share(1) }} or more of the tokens in {{ count }} of {{
        every }} rollouts after the first.{% endif %}
    """,
    threshold="""
        99% of the tokens of every rollout after rollout 0, in 2 rollouts of 100 tokens; or of one rollout
        after one in which they differ, unless --ref-update-interval is set
    """,
    ruled_out="""
        A policy that has not moved yet, because {% if before is defined %}it had moved before {%- else
        %}rollout 0 is left out{% endif %}. Rounding, because it never makes all tokens equal.
    """,
    fix="""
        {%- if before is defined %} If the run was resumed there, the reference was loaded from its
        checkpoint (NVIDIA-NeMo/RL#3722), so that the KL to it is 0 again. Let --ref-load name the first
        weights, or set --ref-update-interval if the reference is to follow the policy. {%- else %}
        Either one list is a copy of the other (the reference model was loaded over the trainer's, or
        its forward pass is used for both), or the weights do not move. In that case check the
        learning rate, the gradient norm and frozen parameters.{% endif %}
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds that log_probs equal ref_log_probs in every rollout after the first, or after they differed."""
    later = [s for s in d.rollouts if s.rollout_id > 0 and s.tokens >= FEWEST]
    known = sorted(s for s in d.of(Reference).rollouts if s.rollout_id > 0)
    need(len(known) >= 2, "ref_log_probs of 2 rollouts after the first (slime: --use-kl-loss)")
    differing = [s for s in known if s.share < EQUAL]
    if differing:
        return None if d.flags.get("ref_update_interval") else _replaced(known, differing[0], bool(d.flags))
    equal = min(s.share for s in known)
    ids = tuple(s.rollout_id for s in known)
    return {"count": len(known), "every": len(later), "equal": equal, "rollouts": ids}


def _replaced(known: Sequence[Unmoved], first: Unmoved, are_flags_known: bool) -> Figures | None:
    """Returns the rollouts in which both policies are equal again, after a rollout in which they differ.

    Two policies that have moved apart agree again only if one is put in the place of the other. Without the
    run's flags it may have been asked for.
    """
    later = [s for s in known if s.rollout_id > first.rollout_id and s.share >= EQUAL]
    if not later:
        return None
    before = max((s for s in known if s.rollout_id < later[0].rollout_id), key=lambda s: s.rollout_id)
    rollouts, equal = tuple(s.rollout_id for s in later), min(s.share for s in later)
    figures = {"rollouts": rollouts, "equal": equal, "before": before.rollout_id, "differ": before.share}
    return figures if are_flags_known else figures | {"severity": "note"}
