"""The finding ``growing_mismatch``."""

from __future__ import annotations

from statistics import fmean, median

from slime_ext.tools.analysis.detectors.shared.ages import fresh_and_stale
from slime_ext.tools.analysis.detectors.shared.along import rather_than_rollouts
from slime_ext.tools.analysis.detectors.shared.detector import FEW, Detector, Figures
from slime_ext.tools.analysis.detectors.shared.push import ARRIVES, enough, growth, ways
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="warning",
    group="pushes",
    after=(
        "spoilt",
        "other_policy",
        "prefixes",
        "stale_cache",
        "frozen_sampler",
        "partial_push",
        "parts",
        "experts",
    ),
    what="the distance grows, from the named rollout on",
    asks="6 rollouts",
    title="The policies move further apart, from rollout {{ begin.rollout_id }} on.",
    evidence="""
        Mean |log-ratio| {{ before | nats }} before rollout {{ begin.rollout_id }}, {{ begin.absolute |
        nats }} in it, {{ late | nats }} at the end ({{ (late / [before, 1e-12] | max) | factor }}).
    """,
    threshold="""
        3 times the distance before the onset at the end, every rollout since then 30% above it, and still
        rising
    """,
    ruled_out="""
        Longer responses: they are {{ "%.2g" | format(longer) }} times as long as in the first rollout. A
        lag of weights or a quantised engine: neither grows.
    """,
    fix="""
        Look at what happened at rollout {{ begin.rollout_id }}: pushes that fail since then (does
        the engine confirm each?), an engine that was restarted, a change of flags. If nothing
        happened there, look at scales of a quantised engine that were fixed at start-up, and at
        weights that outgrow a narrow dtype.
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds the rollout from which on mean |l| grows and does not come back."""
    rollouts = enough(d)
    found = growth(rollouts)
    way = ways(rollouts)
    arrives = way is not None and way[0] >= ARRIVES * way[1]
    if found is None or (len(found.since) >= len(rollouts) - 2 and not arrives):  # a lag, or never pushed
        return None
    since, stale = {s.rollout_id for s in found.since}, fresh_and_stale(d.statistics.versions)[1]
    if 2 * sum(v.count for v in stale if v.rollout_id in since) > sum(s.tokens for s in found.since):
        return None
    if median(s.top_share for s in found.since) >= FEW or rather_than_rollouts(d):
        return None
    longer = fmean(s.length for s in found.since) / max(rollouts[0].length, 1.0)
    return {**found.figures(), "begin": found.since[0], "longer": longer}
