"""Finds the first layer whose output differs between trainer and sampler, over the same text."""

from __future__ import annotations

import math
from typing import NamedTuple

from slime_ext.tools.analysis.detectors.shared.along import falls
from slime_ext.tools.analysis.detectors.shared.healthy import is_healthy
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

# Unit roundoffs of a layer's dtype, times the square root of the number of layers. Two sides in bfloat16 make
# 0.9 to 1.3 in small models (benchmarks/faults), INT8 weights 2.8, a cache in FP8 3.9, INT4 weights 44.
ROUNDINGS, NEAR, WEIGHTS = 16.0, 4.0, 64.0


class LayerApart(NamedTuple):
    """A layer whose outputs are further apart than rounding makes.

    Attributes:
        distance: median relative distance after it; ``before``: after the layer before it, if there is one.
        error: standard error of ``distance``.
        limit: the largest distance that rounding of the outputs makes.
        most: the largest distance that weights in 4 bits make.
    """

    layer: int
    distance: float
    error: float
    before: float | None
    limit: float
    most: float


def layer_apart(d: Diagnosis) -> LayerApart | None:
    """Returns the first layer that differs by more than rounding; None without layer outputs.

    A distance that rounded weights may make matters only if numbers are not healthy, or if |l| falls along
    the response, because that of rounded weights does not.
    """
    far = _first_beyond(d, ROUNDINGS)
    return far or (_first_beyond(d, NEAR) if not is_healthy(d) or falls(d) else None)


def _first_beyond(d: Diagnosis, roundings: float) -> LayerApart | None:
    before = None
    for layer, distance, roundoff, error in d.layers:
        of_depth = roundoff * math.sqrt(layer + 1)
        if distance > roundings * of_depth:
            return LayerApart(layer, distance, error, before, roundings * of_depth, WEIGHTS * of_depth)
        before = distance
    return None
