"""What a step reads and what it hands on: facts that never change, and a state of weights and keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from slime_ext.errors import ConfigError
from slime_ext.ops import divergences
from slime_ext.ops.segments import Segments
from slime_ext.ops.statistics import Need, Unit

Aggregate = Literal["sum", "mean", "max"]


@dataclass(frozen=True)
class State:
    """What steps hand on, [T] each."""

    weights: Tensor  # multiplies the loss; ratios until something bounds them
    keep: Tensor  # bool, false where a step rejected the token
    clipped: Tensor | None = None  # bool, where a bound acted; None when nobody asked


@dataclass(frozen=True)
class Facts:
    """What steps may look at. None of it changes from step to step."""

    segments: Segments
    log_ratio: Tensor  # [T] log numerator - log behavior, nats, 0 where there is none
    numerator: Tensor  # [T] log-probs, nats
    behavior: Tensor  # [T] log-probs, nats
    finite: Tensor  # [T] bool, response tokens whose behavior log-prob is finite
    advantages: Tensor | None = None  # [T]
    table: Mapping[Need, Tensor] = field(default_factory=dict)
    usable: Tensor | None = None  # [T] bool, finite tokens of units without a non-finite one
    plan: Mapping[Any, Tensor] = field(
        default_factory=dict
    )  # coupled step -> scalar settled for the whole step

    def value_of(self, name: str) -> Tensor:
        """The per-token quantity [T] that a statistic's name stands for."""
        if name in divergences.OF_RATIO:
            return divergences.OF_RATIO[name](self.log_ratio)
        if name in divergences.OF_BOTH:
            return divergences.OF_BOTH[name](self.numerator, self.behavior)
        if name == "one":
            return torch.ones_like(self.log_ratio)
        if name == "nonfinite":
            return (~self.finite).to(self.log_ratio.dtype)
        return {"ratio": self.log_ratio, "advantage": self.advantages}[name]

    def spread(self, unit: Unit, values: Tensor) -> Tensor:
        """A value per unit -> the same at each of its tokens [T]."""
        if unit == "token":
            return values
        return values.index_select(0, self.segments.turn_ids if unit == "turn" else self.segments.ids)

    def total(self, unit: Unit, aggregate: Aggregate, name: str) -> Tensor:
        """An aggregate per unit; at unit token the quantity itself."""
        if unit == "token":
            return self.value_of(name)
        if aggregate == "mean":
            return self.table[Need("sum", unit, name)] / self.table[Need("sum", unit, "one")].clamp_min(1)
        return self.table[Need(aggregate, unit, name)]


class Step:
    """What the correction expects of a step; these are the answers of one that looks at single tokens
    only."""

    unit: Unit = "token"  # what one non-finite behavior log-prob takes with it
    needs: tuple[Need, ...] = ()  # the statistics that the call reads
    reads_advantages: bool = False
    is_bound: bool = False  # whether weights are finite after it
    is_coupled: bool = False  # whether it settles a scalar over the whole optimizer step

    def __call__(self, state: State, facts: Facts) -> State:
        raise NotImplementedError


def needs_of(unit: Unit, aggregate: Aggregate, name: str) -> tuple[Need, ...]:
    """What ``Facts.total`` reads for the same arguments."""
    if unit == "token":
        return ()
    if aggregate == "mean":
        return Need("sum", unit, name), Need("sum", unit, "one")
    return (Need(aggregate, unit, name),)


def expect(ok: bool, where: str, expected: str, got: object, why: str) -> None:
    """Raises ConfigError in the form of all our messages, unless ``ok``."""
    if not ok:
        raise ConfigError(f"{where}: expected {expected}, got {got}: {why}")
