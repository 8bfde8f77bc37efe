"""The finding ``stale_cache``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    after=("spoilt",),
    what="the engine kept its KV cache after a weight update inside a response",
    asks="versions by token",
    title="After a weight update inside a response, the engine keeps the KV cache of the previous weights.",
    evidence="""
        k3 is {{ after | nats }} at tokens after an update inside their response, and {{ pure | nats
        }} at tokens of the same weights in responses without an update: {{ (after / [pure, 1e-12] |
        max) | factor }}.
    """,
    threshold="k3 after an update is 3 times that of the same weights elsewhere, and 2e-4 nats",
    ruled_out="Old weights, because both groups of tokens come from the same weight versions.",
    fix="""
        Flush the cache when weights change, so that running requests are prefilled again (SGLang:
        flush_cache, or abort and resume with the tokens so far).
    """,
)

FEWEST = 100  # tokens on each side
CACHE_TIMES, CACHE_MATTERS = 3.0, 2e-4  # times k3 elsewhere; nats of k3


def look(d: Diagnosis) -> Figures | None:
    """Finds that k3 is several times as large after a weight update inside a response."""
    (count, *_, after), (count_pure, *_, pure) = d.statistics.switched.tolist()
    is_enough = min(count, count_pure) >= FEWEST
    need(is_enough, "weight versions by token, and a weight update inside responses")
    k3_after, k3_pure = after / count, pure / count_pure
    if k3_after < max(CACHE_MATTERS, CACHE_TIMES * k3_pure):
        return None
    return {"after": k3_after, "pure": k3_pure}
