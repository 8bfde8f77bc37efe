"""The finding ``stale_prefix``."""

from __future__ import annotations

import math

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    group="prefixes",
    after=("spoilt", "other_log_probs", "packing_leak", "part_of_run"),
    what="the engine reuses keys and values of old weights: only responses after a cached prefix are far off",
    asks="`prefix_cache_info`",
    title="Responses after a cached prefix are far off: the engine reuses keys and values of old weights.",
    evidence="""
        k3 is {{ cached | nats }} in {{ samples }} of {{ of }} samples whose prompt begins in the
        engine's prefix cache, and {{ fresh | nats }} in the others of the same rollouts: {{ (cached /
        [fresh, 1e-12] | max) | factor }}.
    """,
    threshold="""
        k3 after a cached prefix is 3 times that without one and 1e-3 nats, by 3 standard errors over
        sequences
    """,
    ruled_out="""
        Old weights in the sampler, because samples of the same rollouts without a cached prefix come
        from the same weights.
    """,
    fix="""
        Flush the prefix cache at every push (SGLang: flush_cache after update_weights). As a test,
        sample with the prefix cache off (--sglang-disable-radix-cache), or restart the engine and see
        whether the distance disappears.
    """,
)

# Tokens; times k3; nats of k3; standard errors.
PREFIX_TOKENS, PREFIX_TIMES, PREFIX_MATTERS, PREFIX_SURE = 100, 3.0, 1e-3, 3.0


def look(d: Diagnosis) -> Figures | None:
    """Finds that responses after a cached prefix are several times as far off as others."""
    (n, near, _), (m, other, square) = (row[1:] for row in d.statistics.cached.tolist())
    is_enough = min(n, m) >= PREFIX_TOKENS
    need(is_enough, "prefix_cache_info of a rollout's samples, some with and some without a cached prefix")
    cached, fresh = other / m, near / n
    error = math.sqrt(square) / m  # over sequences
    if cached < max(PREFIX_TIMES * fresh, PREFIX_MATTERS) or cached - fresh < PREFIX_SURE * error:
        return None
    samples, of = int(d.statistics.cached[1, 0]), int(d.statistics.cached[:, 0].sum())
    return {"cached": cached, "fresh": fresh, "samples": samples, "of": of}
