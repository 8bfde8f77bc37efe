"""What a step reads and what it hands on: facts that never change, and a state of weights and keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from slime_ext.errors import ConfigError
from slime_ext.ops import divergences
from slime_ext.ops.segments import Segments
from slime_ext.ops.statistics import Need, Unit

Aggregate = Literal["sum", "mean", "max", "peak"]


@dataclass(frozen=True)
class State:
    """What steps hand on."""

    weights: Tensor  # [T], multiplies the loss; ratios until something bounds them
    keep: Tensor  # [T] bool, false where a step rejected the token alone
    units: Mapping[Unit, Tensor] = field(
        default_factory=dict
    )  # unit -> bool per unit, false where it was rejected
    clipped: Tensor | None = None  # [T] bool, where a bound acted; None when nobody asked

    def reject(self, unit: Unit, inside: Tensor) -> State:
        """Keeps the units that are ``inside``; only the last state is spread over the tokens."""
        if unit == "token":
            return replace(self, keep=self.keep & inside)
        before = self.units.get(unit)
        return replace(self, units={**self.units, unit: inside if before is None else before & inside})


@dataclass(frozen=True)
class Facts:
    """What steps may look at. None of it changes from step to step."""

    segments: Segments
    log_ratio: Tensor  # [T] log numerator - log behavior, nats, 0 where there is none
    finite: Tensor  # [T] bool, response tokens whose behavior log-prob is finite
    numerator: Tensor  # [T] log-probs, nats; anything where not finite
    behavior: Tensor  # [T] log-probs, nats; anything where not finite
    advantages: Tensor | None = None  # [T]; anything at masked tokens
    table: Mapping[Need, Tensor] = field(default_factory=dict)
    plan: Mapping[Any, Tensor] = field(
        default_factory=dict
    )  # coupled step -> number settled for the whole step

    def value_of(self, name: str) -> Tensor:
        """The per-token quantity [T] that a statistic's name stands for, 0 at masked tokens."""
        if name in divergences.OF_RATIO:
            return divergences.OF_RATIO[name](self.log_ratio)
        if name in divergences.OF_BOTH:
            return divergences.OF_BOTH[name](
                *(torch.where(self.finite, x, 0) for x in (self.numerator, self.behavior))
            )
        plain = {
            "ratio": lambda: self.log_ratio,
            "one": lambda: self.segments.mask.to(self.log_ratio.dtype),
            "nonfinite": lambda: (self.segments.mask & ~self.finite).to(self.log_ratio.dtype),
            "advantage": lambda: self.segments.zeroed(self.advantages),
        }
        return plain[name]()

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

    def kept(self, state: State) -> Tensor:
        """[T] bool, the response tokens that a state keeps."""
        keep = state.keep
        for unit, inside in state.units.items():
            keep = keep & self.spread(unit, inside)
        return keep

    @cached_property
    def untouched(self) -> State:
        """The state before any step: units with a non-finite behavior log-prob are out."""
        sound = {n.unit: self.table[n] == 0 for n in self.table if n.name == "nonfinite"}
        return State(torch.ones_like(self.log_ratio), self.finite, sound)

    @cached_property
    def usable(self) -> Tensor:
        """[T] bool, the tokens that the state before any step keeps."""
        return self.kept(self.untouched)


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
