"""Finds the first layer whose output differs between trainer and sampler, over the same text."""

from __future__ import annotations

import math
from typing import NamedTuple

from slime_ext.tools.analysis.detectors.shared.healthy import is_healthy
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

# Unit roundoffs of a layer's dtype, times the square root of the number of layers. Two sides in bfloat16 make
# 0.9 to 1.3 in small models (benchmarks/faults), INT8 weights 2.8, a cache in FP8 3.9, INT4 weights 44.
ROUNDINGS, NEAR = 16.0, 4.0


class LayerApart(NamedTuple):
    """A layer whose outputs are further apart than rounding makes.

    Attributes:
        distance: median relative distance after it; ``before``: after the layer before it, if there is one.
        limit: the largest distance that rounding makes.
        is_near: whether rounded weights may make this distance as well.
    """

    layer: int
    distance: float
    before: float | None
    limit: float
    is_near: bool


def layer_apart(d: Diagnosis) -> LayerApart | None:
    """Returns the first layer that differs by more than rounding; None without layer outputs.

    A distance that rounded weights may make matters only beside numbers that are not healthy.
    """
    far = _first_beyond(d, ROUNDINGS)
    return far or (None if is_healthy(d) else _first_beyond(d, NEAR))


def _first_beyond(d: Diagnosis, roundings: float) -> LayerApart | None:
    before = None
    for layer, distance, roundoff in d.layers:
        limit = roundings * roundoff * math.sqrt(layer + 1)
        if distance > limit:
            return LayerApart(layer, distance, before, limit, roundings < ROUNDINGS)
        before = distance
    return None
