"""The finding ``rollouts_apart``."""

from __future__ import annotations

import math

from slime_ext.tools.analysis.detectors.shared.began import began_by_k3, dated
from slime_ext.tools.analysis.detectors.shared.detector import FEW, Detector, Figures, Untold, need
from slime_ext.tools.analysis.detectors.shared.explained import K3, explained
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.rollouts import mean_k3

DETECTOR = Detector(
    severity="warning",
    side="either",  # a symptom
    says="symptom",
    after=(
        "spoilt",
        "other_policy",
        "prefixes",
        "parts",
        "pushes",
        "resumed_wrong_weights",
        "stale_weights",
        "stale_cache",
        "shared_place",
    ),
    what="only a few rollouts are far off",
    asks="4 rollouts",
    title="""
        Only rollout{{ 's' if rollouts | length > 1 }} {{ rollouts | join(', ') }} {{ 'are' if rollouts
        | length > 1 else 'is' }} far off.
    """,
    evidence="k3 is {{ k3 | nats }} there and {{ rest | nats }} over all {{ others }} others.{{ dated }}",
    threshold="""
        at most a third of the rollouts have 6 times the k3 of all others together, and 5e-3 nats, by
        3 standard errors
    """,
    ruled_out="",
    remedy="look in the log before these rollouts for a push that failed or came late",
    fix="""
        Look at the log around these rollouts for a push that failed or came late, an engine that was
        restarted (from which weights?), a resume, or another set of prompts.
    """,
)
FEWEST, TIMES, MATTERS, SURE = 100, 6.0, 5e-3, 3.0
UNTOLD = Untold(
    "which weights sampled these rollouts",
    "record weight versions of the samples, or read the engines' log of weight updates there",
)


def look(d: Diagnosis) -> Figures | None:
    """Finds the fewest rollouts whose k3 is several times that of all others together."""
    rollouts = [s for s in d.rollouts if s.tokens >= FEWEST]
    need(len(rollouts) >= 4, f"4 rollouts of {FEWEST} tokens")
    need(all(s.k3_error for s in rollouts), "several samples per rollout, for the standard error of k3")
    ordered = sorted(rollouts, key=lambda s: -s.k3)
    for count in range(1, len(rollouts) // 3 + 1):
        far, others = ordered[:count], ordered[count:]
        rest = mean_k3(others)
        lowest = min(far, key=lambda s: s.k3 * math.exp(-SURE * s.k3_error))
        if lowest.k3 * math.exp(-SURE * lowest.k3_error) < max(MATTERS, TIMES * rest):
            continue
        if others[0].k3 < max(MATTERS, TIMES * rest) and any(s.top_share < FEW for s in far):
            ids = tuple(sorted(s.rollout_id for s in far))
            return {
                "rollouts": ids,
                "dated": dated(d, began_by_k3(rollouts, ids)),
                "k3": mean_k3(far),
                "rest": rest,
                "others": len(others),
                "explains": explained(K3.of_rollouts(far), K3.of_rollouts(others)),
                "or_else": ("resumed_wrong_weights", "stale_weights"),
                "untold": (UNTOLD,),
            }
    return None
