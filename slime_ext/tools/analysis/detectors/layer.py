"""The finding ``layer``."""

from __future__ import annotations

import math

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    after=("spoilt", "other_policy", "prefixes", "pushes", "parts", "experts"),
    what="the first layer whose output differs by more than rounding",
    asks="layer outputs",
    title="Layer {{ layer }} is the first whose output differs.",
    evidence="""
        Median relative distance {{ "%.2g" | format(distance) }} after layer {{ layer }}, {% if before is
        none %}it is the first of the dump {%- else %}{{ "%.2g" | format(before) }} after the layer before
        it{% endif %}; rounding would make {{ "%.2g" | format(limit) }} at most.
    """,
    threshold="""
        16 unit roundoffs of the coarser side's dtype, times the root of the number of layers so far
    """,
    ruled_out="Rounding: it adds up as the root of the number of layers, in units of the dtype.",
    fix="""
        Compare layer {{ layer }} on both sides: its weights after a push, norm epsilon and dtype, rotary
        settings, attention backend, quantisation of this layer. Layers behind it only carry on.
    """,
)

ROUNDINGS = 16.0  # unit roundoffs of a layer's dtype, times the root of the number of layers


def look(d: Diagnosis) -> Figures | None:
    """Finds the first layer after which |trainer - sampler| / |trainer| is above what rounding makes."""
    need(d.layers, "layer outputs of both sides in layers/trainer and layers/sampler of the run's folder")
    before = None
    for found in d.layers:
        limit = ROUNDINGS * found.roundoff * math.sqrt(found.layer + 1)
        if found.distance > limit:
            return {"layer": found.layer, "distance": found.distance, "limit": limit, "before": before}
        before = found.distance
    return None
