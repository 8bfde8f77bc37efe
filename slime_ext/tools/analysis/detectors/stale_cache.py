"""The finding ``stale_cache``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    after=("spoilt",),
    what="after a weight update inside a response the engine kept its KV cache",
    asks="versions by token",
    title="After a weight update inside a response, the engine keeps its KV cache of the former weights.",
    evidence="""
        k3 {{ after | nats }} at tokens behind an update inside their response, {{ pure | nats }} at
        tokens of the same weights in responses without one: {{ (after / [pure, 1e-12] | max) | factor }}.
    """,
    threshold="k3 behind an update 3 times that of the same weights elsewhere, and 2e-4 nats",
    ruled_out="Stale weights: both sides of the comparison are of the same version.",
    fix="""
        Flush the cache when weights change and let running requests be prefilled again (SGLang:
        flush_cache, or abort and resume with the tokens so far).
    """,
)

FEWEST = 100  # tokens on each side
CACHE_TIMES, CACHE_MATTERS = 3.0, 2e-4  # of k3


def look(d: Diagnosis) -> Figures | None:
    """Finds that k3 behind a weight update inside a response is a multiple of that of the same weights
    elsewhere."""
    (count, *_, after), (count_pure, *_, pure) = d.statistics.switched.tolist()
    is_enough = min(count, count_pure) >= FEWEST
    need(is_enough, "weight versions by token, and a weight update inside responses")
    k3_after, k3_pure = after / count, pure / count_pure
    if k3_after < max(CACHE_MATTERS, CACHE_TIMES * k3_pure):
        return None
    return {"after": k3_after, "pure": k3_pure}
