"""Says what rounding cannot make: a distance that is too large, or that a push changes."""

from __future__ import annotations

from itertools import pairwise

from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.rollouts import equally_certain

# nats, mean |l|. No rounding makes TOO_LOUD: four bits per weight (32 weights per scale) make 0.35 in the
# models of the tests and 0.74 in SmolLM2, three bits make more than 1.
TOO_LOUD = 2.5
LEVEL = 1.5  # largest mean |l| of a rollout over the smallest, for noise that no push removes


def stays(d: Diagnosis) -> bool:
    """Returns whether the distance stays the same from rollout 0 on while weight versions advance.

    Wrong weights that a push replaces would have disappeared with the first push.
    """
    rollouts, distances = d.rollouts, equally_certain(d.rollouts)
    is_pushed = all(b.version > a.version >= 0 for a, b in pairwise(rollouts))
    begins = len(rollouts) >= 3 and rollouts[0].rollout_id == 0
    return begins and is_pushed and max(distances) <= LEVEL * min(distances)
