"""Lists what is measured.

These are sums over tokens and sequences, the bins of the histogram and of the curves, and the counts of each
step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from slime_ext.core.state import Effect, Step
from slime_ext.ops.histogram import LogBins

HISTOGRAM = LogBins(low=-20, high=7, digits=4)  # of log-ratios, nats: 16 bins per power of 2

CURVE_COLUMNS = ("counted", "kept", "k3", "ratio_minus_one", "weight")
# Numbers of tokens that are added up.
NUMBERS = ("log_behavior", "k3", "ratio_minus_one", "ratio_minus_one_squared", "weight", "weight_squared")
TAIL = "tail"  # the probability of all tokens that are not in the sampler's head
DIFFERING = "differing"  # tokens whose log-ratio is not exactly 0
PER_SEQUENCE = (
    *("log_ratio", "response", "sequences", "kept_sequences"),
    *("aged", "aged_steps", "age", "age_steps"),
)
HIGHEST = (
    "log_ratio_max",
    "log_ratio_min",
    "weight_max",
    "age_max",
    "age_steps_max",
)
LOG_SUMS = ("log_squared_ratios", "log_ratios")  # of sequences

POSITIONS = (16, 64, 256, 1024, 4096, 16384, 65536)  # number of earlier tokens in the response
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


class EffectCount(NamedTuple):
    """A count of response tokens that a step clipped, rejected or kept.

    A token is kept if neither this step nor an earlier one rejects it.
    """

    name: str
    kind: Literal["clipped", "rejected", "kept"]
    step: int  # its place in the list, from 0


class Steps(Protocol):
    """The parts of a correction that decide what is measured."""

    @property
    def steps(self) -> Sequence[Step]: ...

    @property
    def terms(self) -> Sequence[object]: ...

    @property
    def group(self) -> str: ...

    @property
    def center(self) -> object: ...


@dataclass(frozen=True)
class MetricsLayout:
    """The layout of one correction's sums.

    Args:
        effects: what is counted for each step.
        terms: the metric of each loss term, a sum over response tokens, nats.
        curves: whether the three curves are measured.
        head: whether the tokens come with the sampler's head.
        differing: whether tokens with unequal log-probs are counted. This costs one more operation.
    """

    effects: tuple[EffectCount, ...] = ()
    terms: tuple[str, ...] = ()
    curves: bool = True
    head: bool = False
    differing: bool = False

    @classmethod
    def of(cls, correction: Steps, *, curves: bool = True, differing: bool = False) -> MetricsLayout:
        """Lays out the metrics of a correction."""
        terms = tuple(f"terms/{name}/mean" for name in _numbered(correction.terms))
        return cls(tuple(_effects(correction)), terms, curves, correction.center is not None, differing)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sums that are one number each, in their order.

        They begin with ``NUMBERS``. The histogram and the curves follow them.
        """
        effects = (effect.name for effect in self.effects)
        optional = (*([TAIL] if self.head else []), *([DIFFERING] if self.differing else []))
        counts = ("counted", "kept", "clipped", "surrogate_clipped", *effects)
        return (*NUMBERS, *counts, *self.terms, *PER_SEQUENCE, *optional)

    @property
    def size(self) -> int:
        """The number of sums."""
        of_curves = len(CURVES) * CURVE_BINS * len(CURVE_COLUMNS) if self.curves else 0
        return len(self.names) + HISTOGRAM.size + of_curves


def step_names(correction: Steps) -> list[str]:
    """Names each step by its index and its class, in the order of the configuration.

    >>> from slime_ext import presets
    >>> step_names(presets.get("token_tis"))
    ['0_reweight', '1_truncate']
    """
    return _numbered(correction.steps)


def _numbered(things: Sequence[object]) -> list[str]:
    named = (type(thing).__name__ for thing in things)
    return [f"{i}_{re.sub('(?<=[a-z])(?=[A-Z])', '_', name).lower()}" for i, name in enumerate(named)]


def _effects(correction: Steps) -> Iterator[EffectCount]:
    for place, (step, name) in enumerate(zip(correction.steps, step_names(correction), strict=True)):
        if Effect.BOUND in step.effects:
            yield EffectCount(f"steps/{name}/clipped_fraction", "clipped", place)
        if Effect.REJECT in step.effects:
            yield EffectCount(f"steps/{name}/rejected_fraction", "rejected", place)
            yield EffectCount(f"steps/{name}/kept_fraction", "kept", place)
    if correction.group == "atomic":
        yield EffectCount("steps/group/rejected_fraction", "rejected", len(correction.steps))
