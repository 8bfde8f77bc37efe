"""A KV cache that outlives the weights that wrote it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_ext.analysis.document import Finding
from slime_ext.analysis.findings import SPOILT, Detector
from slime_ext.analysis.findings.words import factor, nats

if TYPE_CHECKING:
    from slime_ext.analysis.diagnosis import Diagnosis

FEWEST = 100  # tokens on each side
TIMES, MATTERS = 3.0, 2e-4  # of k3


def stale_cache(d: Diagnosis) -> Finding | None:
    """k3 behind a weight update inside a response a multiple of that of the same weights elsewhere."""
    (count, *_, after), (count_pure, *_, pure) = d.evidence.switched.tolist()
    if min(count, count_pure) < FEWEST:
        return None
    k3_after, k3_pure = after / count, pure / count_pure
    if k3_after < max(MATTERS, TIMES * k3_pure):
        return None
    return Finding(
        name="stale_cache",
        severity="error",
        title="After a weight update inside a response, the engine goes on with the KV cache of before.",
        evidence=(
            f"k3 {nats(k3_after)} at tokens behind an update inside their response, {nats(k3_pure)} at "
            f"tokens of the same weights in responses without one: {factor(k3_after / max(k3_pure, 1e-12))}."
        ),
        fix=(
            "Flush the cache when weights change and let running requests be prefilled again (SGLang: "
            "flush_cache, or abort and resume with the tokens so far)."
        ),
    )


DETECTORS = (Detector("stale_cache", stale_cache, after=SPOILT),)
