"""The finding ``frozen_sampler``."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from slime_ext.tools.analysis.detectors.shared.ages import pushes_arrive
from slime_ext.tools.analysis.detectors.shared.along import rather_than_rollouts
from slime_ext.tools.analysis.detectors.shared.began import began_by_distance, dated
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, Untold
from slime_ext.tools.analysis.detectors.shared.push import (
    MATTERS,
    Growth,
    advances,
    growth,
    moves_along,
    ways,
    with_versions,
)
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.rollouts import RolloutSummary

DETECTOR = Detector(
    severity="error",
    side="honest",
    group="pushes",
    after=("spoilt", "other_policy", "prefixes", "stale_cache", "parts", "experts"),
    what="weight versions advance but no weights arrive: the sampler stays at the first policy",
    asks="6 rollouts, versions",
    title="""
        {% if way -%} The sampler still has its first weights: pushes advance its version and change
        nothing. {%- else -%} The distance between the policies grows from the first push on. {%-
        endif %}
    """,
    evidence="""
        {% if way %}The sampler is {{ way[0] | nats }} from the first policy, the trainer {{ way[1] |
        nats }}. {% endif %}Mean |log-ratio| {{ before | nats }} before the first push, {{ late | nats
        }} at the end ({{ (late / [before, 1e-12] | max) | factor }}), while the versions went from {{
        first }} to {{ last }}.{{ dated }}
    """,
    threshold="""
        from the first push on, mean |l| rises by 35%, and at the end it is 3 times that of the first
        rollout. With ref_log_probs, 2 times is enough, because they show that only the trainer leaves
        the first policy
    """,
    ruled_out="""
        A lag of weights, because its distance stops growing after as many rollouts as it lags, or
        falls with each push.
    """,
    remedy="find out why no push arrives: an adapter that is never sent, or names that the engine skips",
    fix="""
        Compare a checksum of a trained weight on both sides after a push. Usual causes are a LoRA
        adapter that is trained and never sent (the engine lists none), a push of the base weights,
        and names that the engine does not know and skips.
    """,
)

# Noise makes a sampler that did not move seem to have moved this far: as a share of the trainer's distance
# from the first policy, or as a multiple of the distance between both sides at the beginning.
SAME, NO_MOVE = 0.35, 2.0
# If the sampler did not move: the least ratio of the trainer's distance from the first policy to the
# sampler's, and of the distance at the end to that at the beginning.
LEFT = 2.0
UNTOLD = Untold(
    "how far each side is from the first policy",
    "record ref_log_probs (slime: --use-kl-loss with coefficient 0), which also shows a numerical error that "
    "grows",
)


def look(d: Diagnosis) -> Figures | None:
    """Finds a sampler that stays at the first policy while its weight version advances."""
    rollouts = with_versions(d)
    grown, way = _from_the_first_push(rollouts), ways(rollouts)
    if way:
        is_moved = _moves(rollouts[0], way[0]) and moves_along(d, way)
        grown = None if is_moved else _left_behind(rollouts, way)
    if grown is None or rather_than_rollouts(d) or pushes_arrive(d):
        return None
    figures = {**grown.figures(), "way": way, "first": rollouts[0].version, "last": rollouts[-1].version}
    figures |= {"dated": dated(d, began_by_distance(rollouts))}
    return (
        figures if way else figures | {"or_else": ("partial_push", "growing_mismatch"), "untold": (UNTOLD,)}
    )


def _from_the_first_push(rollouts: Sequence[RolloutSummary]) -> Growth | None:
    """Returns the growth of the distance, if versions advance and it began with the first push."""
    grown = growth(rollouts) if advances(rollouts) else None
    return grown if grown and len(grown.since) >= len(rollouts) - 2 else None


def _left_behind(rollouts: Sequence[RolloutSummary], way: tuple[float, float]) -> Growth | None:
    """Returns the growth of the distance, if only the trainer has left the first policy."""
    before, late = rollouts[0].absolute, fmean(s.absolute for s in rollouts[-len(rollouts) // 3 :])
    pushed, moved = way
    is_still = pushed <= max(SAME * moved, NO_MOVE * before) and moved >= LEFT * pushed
    if not is_still or not advances(rollouts) or late < max(LEFT * before, MATTERS):
        return None
    return Growth(before, late, rollouts[1:], rollouts[:1])


def _moves(first: RolloutSummary, pushed: float) -> bool:
    """Returns whether the sampler is further from the first policy than in rollout 0, when it had it.

    Noise alone keeps it as far off, because neither policy changes.
    """
    return first.rollout_id == 0 and pushed > NO_MOVE * max(first.absolute, first.pushed or 0.0)
