"""The finding ``partial_push``."""

from __future__ import annotations

from collections.abc import Sequence

from slime_ext.tools.analysis.detectors.shared.ages import pushes_arrive
from slime_ext.tools.analysis.detectors.shared.along import rather_than_rollouts
from slime_ext.tools.analysis.detectors.shared.began import began_by_distance
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, Margin, need
from slime_ext.tools.analysis.detectors.shared.kinds import side_by_side
from slime_ext.tools.analysis.detectors.shared.push import (
    ARRIVES,
    advances,
    growth,
    spread_of_ways,
    ways,
    with_versions,
)
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.rollouts import RolloutSummary

DETECTOR = Detector(
    severity="error",
    side="honest",
    group="pushes",
    after=(
        "spoilt",
        "other_policy",
        "prefixes",
        "stale_cache",
        "frozen_sampler",
        "damaged_weights",
        "parts",
        "experts",
    ),
    what="a part of the weights never arrives at the sampler (an adapter, a layer, experts, embeddings)",
    asks="6 rollouts, versions, ref_log_probs",
    title="A part of the weights does not reach the sampler.",
    evidence="""
        Sampler and trainer both move away from the first policy (by {{ way[0] | nats }} and {{ way[1]
        | nats }}), but also away from each other: mean |log-ratio| {{ before | nats }} before the
        first push, {{ late | nats }} at the end ({{ (late / [before, 1e-12] | max) | factor }}).
    """,
    threshold="""
        at the end 3 times the distance before its growth, while versions advance; the sampler has
        moved less than 90% as far as the trainer, but further than a sampler that no weights reach
    """,
    ruled_out="""
        A sampler that no weights reach, because it would still be at the first policy. A lag of
        weights, because its distance stops growing.
    """,
    remedy="compare the names and checksums of all weights after a push, to see which never arrive",
    fix="""
        Compare the names and checksums of all weights after a push. Usual causes are an adapter, one
        layer or pipeline stage, embeddings or a tied head, experts of another rank, and a norm or
        bias with another name in the engine. To name the layer, record layer outputs of both sides
        (layers/trainer, layers/sampler).
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds a distance that grows with the pushes, although the sampler leaves the first policy, too."""
    rollouts = with_versions(d)
    lacks = "log-probs of the first policy (slime: ref_log_probs, with --use-kl-loss or --kl-coef)"
    need(all(s.moved is not None for s in rollouts), lacks)
    grown, way = growth(rollouts) if advances(rollouts) else None, ways(rollouts)
    if grown is None or way is None or way[0] >= ARRIVES * way[1] or rather_than_rollouts(d):
        return None
    if side_by_side(d) or _arrived_once(rollouts) or pushes_arrive(d):
        return None
    pushed, moved = way
    figures = {**grown.figures(), "way": way}
    return figures | {"margin": Margin(1 - pushed / moved, spread_of_ways(rollouts), 1 - ARRIVES)}


def _arrived_once(rollouts: Sequence[RolloutSummary]) -> bool:
    """Returns whether the sampler followed the trainer at first: their distance began to grow only later.

    A part that never arrives is missing from the first push on that follows a step of the trainer.
    """
    began = began_by_distance(rollouts)
    later = [s for s in rollouts if s.version > rollouts[0].version]
    pushed = [s.rollout_id for s in later if s.moved is not None and s.moved > s.absolute]
    return began is not None and bool(pushed) and began.first > pushed[0]
