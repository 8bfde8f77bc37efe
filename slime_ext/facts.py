"""What a step reads and what it hands on: facts that never change, and a state of weights and keep."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from slime_ext.errors import ConfigError
from slime_ext.ops import arrays, divergences
from slime_ext.ops.codes import packed
from slime_ext.ops.segments import Segments, as_bytes, as_numbers, is_traced
from slime_ext.ops.statistics import Need, Over, Unit

Aggregate = Literal["sum", "mean", "max"]
# The number of a step, and bool per unit: what it left inside, or where it bounded; and which of the two.
Act = tuple[int, Unit, Tensor, Literal["inside", "bounded"]]


@dataclass(frozen=True)
class State:
    """What steps hand on."""

    weights: Tensor  # [T], or one per ``unit``: multiplies the loss; ratios until something bounds them
    keep: Tensor  # [T] bool, false where a step rejected the token alone
    units: Mapping[Unit, Tensor] = field(
        default_factory=dict
    )  # unit -> bool per unit, false where it was rejected
    # The steps that bounded these weights, and where: bool, shaped like the weights; None when nobody asked.
    clipped: tuple[tuple[int, Tensor], ...] | None = None
    unit: Unit = "token"  # what weights and clipped are one per
    step: int = 0  # the number, from 1, of the step at work; 0 before any
    acts: tuple[Act, ...] | None = None  # what each step did; None when nobody asked

    def but(self, **changes: Any) -> State:
        """The same with other fields: ``dataclasses.replace`` in a quarter of its time."""
        return State(**(self.__dict__ | changes))

    def reweight(self, unit: Unit, ratio: Tensor) -> State:
        """Starts over with a ratio per unit; only the last state is spread over the tokens."""
        return self.but(weights=ratio, unit=unit, clipped=None if self.clipped is None else ())

    def bound(self, weights: Tensor) -> State:
        """Takes bounded weights, and notes where they differ if anybody asked."""
        if self.clipped is None:
            return self.but(weights=weights)
        both = weights, self.weights
        changed = arrays.differ(*both) if all(map(arrays.is_array, both)) else torch.ne(*both)
        state = self._noted(self.unit, changed, "bounded")
        return state.but(weights=weights, clipped=(*self.clipped, (self.step, changed)))

    def reject(self, unit: Unit, inside: Tensor) -> State:
        """Keeps the units that are ``inside``; only the last state is spread over the tokens."""
        state = self._noted(unit, inside, "inside")
        if unit == "token":
            return state.but(keep=self.keep & inside)
        before = self.units.get(unit)
        return state.but(units={**self.units, unit: inside if before is None else before & inside})

    def _noted(self, unit: Unit, flags: Tensor, kind: Literal["inside", "bounded"]) -> State:
        """Remembers what the step at work did, whatever other steps do to the same units."""
        return self if self.acts is None else self.but(acts=(*self.acts, (self.step, unit, flags, kind)))

    @property
    def rejects(self) -> int:
        """The bits of ``Facts.acted`` of which any takes a token out."""
        return functools.reduce(operator.or_, (1 << i for i, _, _, kind in self.acts if kind == "inside"), 1)


@dataclass(frozen=True)
class Facts:
    """What steps may look at. None of it changes from step to step."""

    segments: Segments
    log_ratio: Tensor  # [T] log numerator - log behavior, nats, 0 where there is none
    finite: Tensor  # [T] bool, response tokens whose behavior log-prob is finite
    numerator: Tensor  # [T] log-probs, nats; anything where not finite
    behavior: Tensor  # [T] log-probs, nats; anything where not finite
    advantages: Tensor | None = None  # [T]; anything at masked tokens
    ages: Tensor | None = None  # [S] trainer's weight version - that of the sample; NaN where unknown
    table: Mapping[Need, Tensor] = field(default_factory=dict)
    plan: Mapping[Any, Tensor] = field(
        default_factory=dict
    )  # coupled step -> number settled for the whole step

    def value_of(self, name: str | Over) -> Tensor:
        """The per-token quantity [T] that a statistic's name stands for, 0 at masked tokens."""
        if isinstance(name, Over):
            return (self.value_of(name.name) - name.limit).clamp_min_(0)
        if name in divergences.OF_RATIO:
            return divergences.OF_RATIO[name](self.log_ratio)
        if name in divergences.OF_BOTH:
            return torch.where(self.finite, divergences.OF_BOTH[name](self.numerator, self.behavior), 0)
        plain = {
            "ratio": lambda: self.log_ratio,
            "count": lambda: as_bytes(self.segments.mask),
            "finite": lambda: as_bytes(self.finite),
            "sound": self._sound,
            "advantage": lambda: self.segments.zeroed(self.advantages),
        }
        return plain[name]()

    def _sound(self) -> Tensor:
        """1 per response token, but infinite for one without a behavior log-prob: its sum counts a unit and
        tells whether it can be trusted, in one."""
        mask = self.segments.mask
        dtype = self.log_ratio.dtype
        return as_numbers(mask, dtype).div_(as_numbers(mask == self.finite, dtype))

    def spread(self, unit: Unit, values: Tensor) -> Tensor:
        """A value per unit -> the same at each of its tokens [T]."""
        if unit == "token":
            return values
        if unit == "turn":
            return values.index_select(0, self.segments.turn_ids)
        return self.segments.spread(values)

    def total(self, unit: Unit, aggregate: Aggregate, name: str) -> Tensor:
        """An aggregate per unit; at unit token the quantity itself, anything at masked tokens."""
        if unit == "token":
            return self.advantages if name == "advantage" else self.value_of(name)
        if aggregate == "mean":
            return self.table[Need("sum", unit, name)] / self.table[Need("sum", unit, "sound")].clamp_min(1)
        return self.table[Need(aggregate, unit, name)]

    def kept(self, state: State, acted: Tensor | None = None) -> Tensor:
        """[T] bool, the response tokens that a state keeps; ``acted`` of the state saves spreading it."""
        if acted is not None and acted.dtype is torch.uint8:
            return as_bytes(self.finite) > (acted & state.rejects)
        keep = state.keep
        for unit, inside in state.units.items():
            keep = keep & self.spread(unit, inside)
        return keep

    def clipped(self, state: State) -> Tensor:
        """[T] bool, where bounds acted on the state's weights."""
        if not state.clipped:
            return torch.zeros_like(self.finite)
        return self.spread(state.unit, functools.reduce(torch.bitwise_or, (c for _, c in state.clipped)))

    def acted(self, codes: Mapping[Unit, Tensor]) -> Tensor:
        """[T] integers of what ``codes`` says of each unit. Anything at masked tokens."""
        if not codes:
            return torch.zeros_like(self.finite, dtype=torch.uint8)
        return functools.reduce(torch.bitwise_or, (self.spread(unit, code) for unit, code in codes.items()))

    def codes(self, state: State) -> dict[Unit, Tensor]:
        """Integers per unit, bit i set where step i (from 1) rejected the unit or bounded its weight; bit 0:
        where a non-finite behavior log-prob took the turn or sequence out."""
        once = self._once(state)
        bits = 1 + max((step for _, step, _ in once), default=0)
        flags: dict[Unit, list[tuple[int, Tensor, bool]]] = {}
        for (unit, step, kind), flag in once.items():
            flags.setdefault(unit, []).append((step, flag, kind == "inside"))
        return {unit: packed(own, bits, by_product=unit != "token") for unit, own in flags.items()}

    def _once(self, state: State) -> dict[tuple[Unit, int, str], Tensor]:
        """What every step did to each unit, in one flag each; as step 0, which units were sound."""
        once: dict[tuple[Unit, int, str], Tensor] = {}
        sound = ((0, unit, inside, "inside") for unit, inside in self.untouched.units.items())
        for step, unit, flags, kind in (*sound, *state.acts):
            key, join = (unit, step, kind), {"inside": torch.bitwise_and, "bounded": torch.bitwise_or}[kind]
            once[key] = join(once[key], flags) if key in once else flags
        return once

    @cached_property
    def untouched(self) -> State:
        """The state before any step: units with a non-finite behavior log-prob are out."""
        sums = (need for need in self.table if need.name == "sound" and need.aggregate == "sum")
        sound = {need.unit: self.table[need] < torch.inf for need in sums}
        like, is_graph = self.log_ratio, is_traced(self.finite)
        one = like.new_ones(()) if is_graph else self.segments.numbers((1,), like)
        return State(one.expand_as(like), self.finite, sound)

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
    reads_ages: bool = False
    is_bound: bool = False  # whether weights are finite after it
    rejects: bool = False  # whether it takes tokens out
    is_coupled: bool = False  # whether it settles a scalar over the whole optimizer step

    def __call__(self, state: State, facts: Facts) -> State:
        raise NotImplementedError


def needs_of(unit: Unit, aggregate: Aggregate, name: str) -> tuple[Need, ...]:
    """What ``Facts.total`` reads for the same arguments."""
    if unit == "token":
        return ()
    if aggregate == "mean":
        return Need("sum", unit, name), Need("sum", unit, "sound")
    return (Need(aggregate, unit, name),)


def expect(ok: bool, where: str, expected: str, got: object, why: str) -> None:
    """Raises ConfigError in the form of all our messages, unless ``ok``."""
    if not ok:
        raise ConfigError(f"{where}: expected {expected}, got {got}: {why}")
