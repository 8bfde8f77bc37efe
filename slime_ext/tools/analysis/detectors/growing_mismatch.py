"""The finding ``growing_mismatch``."""

from __future__ import annotations

from statistics import fmean, median

from slime_ext.tools.analysis.detectors.shared.ages import fresh_and_stale, pushes_arrive
from slime_ext.tools.analysis.detectors.shared.along import rather_than_rollouts
from slime_ext.tools.analysis.detectors.shared.began import began_by_distance, dated
from slime_ext.tools.analysis.detectors.shared.detector import FEW, Detector, Figures
from slime_ext.tools.analysis.detectors.shared.push import ARRIVES, enough, growth, ways
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="warning",
    side="honest",
    group="pushes",
    after=(
        "spoilt",
        "other_policy",
        "prefixes",
        "stale_cache",
        "frozen_sampler",
        "partial_push",
        "damaged_weights",
        "parts",
        "experts",
    ),
    what="the distance between the policies grows, from a named rollout on",
    asks="6 rollouts",
    title="The policies move further apart, from rollout {{ onset }} on.",
    evidence="""
        Mean |log-ratio| {{ before | nats }} before rollout {{ begin.rollout_id }}, {{ begin.absolute |
        nats }} in it, {{ late | nats }} at the end ({{ (late / [before, 1e-12] | max) | factor }}).{{
        dated }}
    """,
    threshold="""
        at the end, the distance is 3 times that before the onset; every rollout since the onset is
        30% above it; and the distance still rises
    """,
    ruled_out="""
        Longer responses, because they are {{ "%.2g" | format(longer) }} times as long as in the first
        rollout. A lag of weights or a quantised engine, because their distance does not grow.
    """,
    remedy="""
        look for pushes that fail since it began, and for quantisation scales that were fixed at
        start-up
    """,
    fix="""
        Check what happened at rollout {{ onset }}: pushes that fail since then (does the
        engine confirm each?), an engine that was restarted, a change of flags. If nothing happened
        there, check whether a quantised engine fixed its scales at start-up, and whether weights
        outgrow a narrow dtype.
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds the rollout from which on mean |l| grows and does not fall again."""
    rollouts = enough(d)
    grown = growth(rollouts)
    way = ways(rollouts)
    arrives = way is not None and way[0] >= ARRIVES * way[1]
    if grown is None or (
        len(grown.since) >= len(rollouts) - 2 and not arrives
    ):  # a lag that begins, or weights that never arrive
        return None
    since, stale = {s.rollout_id for s in grown.since}, fresh_and_stale(d.versions)[1]
    if 2 * sum(v.count for v in stale if v.rollout_id in since) > sum(s.tokens for s in grown.since):
        return None
    if median(s.top_share for s in grown.since) >= FEW or rather_than_rollouts(d) or pushes_arrive(d):
        return None
    longer = fmean(s.length for s in grown.since) / max(rollouts[0].length, 1.0)
    began = began_by_distance(rollouts)
    return {
        **grown.figures(),
        "begin": grown.since[0],
        "onset": began.rollout if began else grown.since[0].rollout_id,
        "dated": dated(d, began),
        "longer": longer,
    }
