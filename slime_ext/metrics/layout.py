"""What is measured, as data: the columns of the token table, the histogram's bins, the curves' bins, and the
rows that a correction's steps add."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from slime_ext.correction import Correction

# The histogram's bins are cut by the first bits of |l| as a float32: the exponent and 4 bits of the mantissa.
BITS = 4
SHIFT = 23 - BITS
FIRST = (127 - 20) << BITS  # those bits of 2^-20 nats
SIDE = 27 << BITS  # bins on each side of 0, from 2^-20 to 2^7 nats
BINS = 2 * (SIDE + 1)  # one more beyond each end; what is left of all tokens lies around 0

CURVE_COLUMNS = ("counted", "kept", "excess", "weight", "k3")
COLUMNS = (*CURVE_COLUMNS, "log_ratio", "log_behavior", "excess_squared", "weight_squared")
PER_SEQUENCE = ("response", "sequences", "kept_sequences", "aged", "age")
HIGHEST = (
    "log_ratio_max",
    "log_ratio_min",
    "weight_max",
    "sequence_log_ratio_max",
    "sequence_log_ratio_min",
    "age_max",
)
LOG_SUMS = ("log_squared_ratios", "log_ratios")  # of sequences

POSITIONS = (16, 64, 256, 1024, 4096, 16384, 65536)  # tokens of the response before it
AGES = (1, 2, 3, 4, 8, 16, 32)  # weight versions
PROBABILITIES = (1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.9, 0.99)  # of the sampled token under the behavior policy
LOG_PROBABILITIES = tuple(map(math.log, PROBABILITIES))


def _whole(edges: tuple[int, ...]) -> Iterator[str]:
    for low, high in zip((0, *edges), edges, strict=False):
        yield str(low) if high == low + 1 else f"{low}-{high - 1}"
    yield f"{edges[-1]}+"


def _shares(edges: tuple[float, ...]) -> Iterator[str]:
    yield from (f"{low:g}-{high:g}" for low, high in zip((0, *edges), (*edges, 1), strict=True))


CURVES = {
    "by_position": tuple(_whole(POSITIONS)),
    "by_staleness": tuple(_whole(AGES)),
    "by_probability": tuple(_shares(tuple(float(f"{p:f}".rstrip("0")) for p in PROBABILITIES))),
}
CURVE_BINS = len(POSITIONS) + 1


@dataclass(frozen=True)
class Layout:
    """What the accumulated vector of one correction holds.

    Args:
        flags: name -> bits of ``Outcome.acted``; counted is the response tokens on which any of them is set.
        curves: whether the three curves are measured.
    """

    flags: tuple[tuple[str, int], ...] = (("clipped", 0),)
    curves: bool = True

    @classmethod
    def of(cls, correction: Correction, *, curves: bool = True) -> Layout:
        """The layout of a correction's metrics."""
        return cls(tuple(_flags(correction)), curves)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The sums of one number each, in their order; the histogram and the curves follow."""
        return (*COLUMNS, *(name for name, _ in self.flags), "surrogate_clipped", *PER_SEQUENCE)

    @property
    def size(self) -> int:
        """How many sums there are in all."""
        curves = len(CURVES) * CURVE_BINS * len(CURVE_COLUMNS) if self.curves else 0
        return len(self.names) + BINS + curves


def step_names(correction: Correction) -> list[str]:
    """Index and name of each step, as in the list of the configuration.

    >>> from slime_ext import presets
    >>> step_names(presets.get("token_tis"))
    ['0_reweight', '1_truncate']
    """
    named = (type(step).__name__ for step in correction.steps)
    return [f"{i}_{re.sub('(?<=[a-z])(?=[A-Z])', '_', name).lower()}" for i, name in enumerate(named)]


def _flags(correction: Correction) -> Iterator[tuple[str, int]]:
    gone = 1
    yield "clipped", sum(1 << i for i, step in enumerate(correction.steps, 1) if step.is_bound)
    for number, (step, name) in enumerate(zip(correction.steps, step_names(correction), strict=True), 1):
        if step.is_bound:
            yield f"steps/{name}/clipped_fraction", 1 << number
        if step.rejects:
            gone |= 1 << number
            yield f"steps/{name}/rejected_fraction", 1 << number
            yield f"steps/{name}/lost_fraction", gone
    if correction.group == "atomic":
        yield "steps/group/rejected_fraction", 1 << (len(correction.steps) + 1)
