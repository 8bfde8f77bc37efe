"""The finding ``partial_push``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.along import rather_than_rollouts
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.push import ARRIVES, advances, growth, ways, with_versions
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    group="pushes",
    after=("spoilt", "other_policy", "prefixes", "stale_cache", "frozen_sampler", "parts", "experts"),
    what="a part of the weights never arrives (an adapter, a layer, experts, embeddings)",
    asks="6 rollouts, versions, ref_log_probs",
    title="A part of the weights does not reach the sampler.",
    evidence="""
        Sampler and trainer both move away from the first policy ({{ way[0] | nats }} and {{ way[1] | nats
        }}), and yet apart: mean |log-ratio| {{ before | nats }} before the first push, {{ late | nats }}
        at the end ({{ (late / [before, 1e-12] | max) | factor }}).
    """,
    threshold="""
        3 times the distance before its growth at the end, while versions advance; the sampler has moved
        less than 90% as far as the trainer, and more than one that nothing reaches
    """,
    ruled_out="""
        A sampler that nothing reaches: it would still be at the first policy. A lag of weights: it stops
        growing.
    """,
    fix="""
        Compare names and checksums of all weights after a push: an adapter, one layer or pipeline stage,
        embeddings or a tied head, experts of another rank, a norm or bias that has another name in the
        engine. Layer outputs of both sides (layers/trainer, layers/sampler) name the layer.
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds a distance that grows from the first push on, by a sampler that moves away from the first policy
    too."""
    rollouts = with_versions(d)
    lacks = "log-probs of the first policy (slime: ref_log_probs, with --use-kl-loss or --kl-coef)"
    need(all(s.moved is not None for s in rollouts), lacks)
    found, way = growth(rollouts) if advances(rollouts) else None, ways(rollouts)
    if found is None or way is None or way[0] >= ARRIVES * way[1] or rather_than_rollouts(d):
        return None
    return {**found.figures(), "way": way}
