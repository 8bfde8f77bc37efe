"""Defines a step, and the data that a correction's steps read and return.

Each step reads ``StepInputs``, which never change, and returns a ``State`` of weights and keep flags. The
last state becomes an ``Outcome``.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch

from slime_ext.core.needs import Need
from slime_ext.core.statistics import (
    ABSENT,
    Aggregate,
    Quantities,
    Share,
    StatisticKey,
    check_words,
    statistics_of,
)
from slime_ext.core.tokens import Unit
from slime_ext.errors import ConfigError, check_known, expect, quoted
from slime_ext.ops.prefixes import prefix_mean, prefix_sum
from slime_ext.ops.segments import AllSum

if TYPE_CHECKING:
    from torch import Tensor

BEFORE = -1  # the ``step`` of records that come before the first step
MODEST = 2.0**32  # a weight up to this number times a loss of ordinary size is finite in float32


@dataclass(frozen=True)
class Plan:
    """Numbers over the whole optimizer step, computed before its first micro-batch is trained.

    Args:
        numbers: coupled step -> its number, [] float64.
        scale: [S] factor of each sequence's loss (``denominator: kept``); None: 1.
        keep: [S] bool, false where the sequence's whole group is rejected (``group: atomic``); None: true.
    """

    numbers: Mapping[Step, Tensor] = field(default_factory=dict)
    scale: Tensor | None = None
    keep: Tensor | None = None


NO_PLAN = Plan()


class StepRecord(NamedTuple):
    """Records what one step did to each unit, independently of the other steps.

    The flags mark the units that the step kept, or those whose weight it clipped.
    """

    step: int  # its place in the list, from 0
    kind: Literal["kept", "clipped"]
    unit: Unit
    flags: Tensor  # bool per unit


@dataclass(frozen=True)
class SequenceStatistics:
    """What metrics read per sequence, [S] each, equal on all ranks that share the sequence."""

    log_ratio: Tensor  # float64, the sum over the response tokens with a finite behavior log-prob, nats
    count: Tensor  # float64, response tokens
    keep: Tensor | None  # bool, false where a step or the plan rejected the whole sequence; None: true


@dataclass(frozen=True)
class Outcome:
    """What a correction decided, [T] each, detached."""

    weights: Tensor  # 0 at rejected and masked tokens
    keep: Tensor  # bool, response tokens that stay in the policy loss
    finite: Tensor  # bool, response tokens whose behavior log-prob is finite
    log_ratio: Tensor  # 0 at tokens that are not finite
    ratio: Tensor  # 1 at tokens that are not finite
    clipped: Tensor  # bool, where a bound changed a weight
    factor: Tensor  # what multiplies the loss: the weights, times the plan's scale if it has one
    step_records: tuple[StepRecord, ...] = ()  # what each step did, in order
    sequences: SequenceStatistics | None = None  # None unless observed
    numbers: Mapping[Step, Tensor] = field(default_factory=dict)  # the plan's, which terms read
    head_factor: Tensor | None = None  # [T] what multiplies C_t; None without ``center``


class State(NamedTuple):
    """Weights and keep flags between two steps.

    Args:
        weights: one number for each token, turn or sequence, as ``unit`` says. All are 1 until a step sets
            them to ratios; later steps may bound them.
        keep: unit -> bool, false where the unit is rejected. A token stays if its own flag and those of its
            turn and sequence are true. The unit token is always there, the others once a step has rejected
            one.
        unit: the unit of the weights.
        clipped: bool, shaped like the weights: where a bound changed them. None: nowhere.
        step_records: what each step did, in order.
        step: the place of the step that is running.
        log_ratio: shaped like the weights: the log of the ratios that they were made from, which is right
            even where a weight has become 0 or infinite. None: the log of the weights is right.
    """

    weights: Tensor
    keep: Mapping[Unit, Tensor]
    unit: Unit = "token"
    clipped: Tensor | None = None
    step_records: tuple[StepRecord, ...] = ()
    step: int = BEFORE
    log_ratio: Tensor | None = None

    @property
    def log_weights(self) -> Tensor:
        """The log of each unit's weight, float64; -inf for a weight of 0.

        A weight that its dtype cannot hold, such as e^-119 and e^89 in float32, reads as 0 or infinity. Its
        log is then the log-ratio that it was made from.
        """
        weights, dtype = self.weights.double(), torch.finfo(self.weights.dtype)
        if self.log_ratio is None:
            return weights.clamp(max=dtype.max).log()
        is_number = (weights >= dtype.tiny) & (weights <= dtype.max)
        return torch.where(is_number, weights.log(), self.log_ratio.double())

    # These methods make a state directly, because ``_replace`` takes as long as a small operation.

    def before_step(self, place: int) -> State:
        """Returns the state that the step at a place gets."""
        return type(self)(
            self.weights, self.keep, self.unit, self.clipped, self.step_records, place, self.log_ratio
        )

    def reweight(self, unit: Unit, ratio: Tensor, log_ratio: Tensor | None = None) -> State:
        """Replaces the weights by one ratio per unit.

        Args:
            log_ratio: the log of the ratios, which coupled steps read. None: they read the log of ``ratio``,
                and cannot tell apart ratios that have become 0 or infinite.
        """
        return type(self)(ratio, self.keep, unit, None, self.step_records, self.step, log_ratio)

    def bound(self, weights: Tensor, log_ratio: Tensor | None = None) -> State:
        """Replaces the weights by bounded ones and records where they changed.

        Args:
            log_ratio: as in ``reweight``; pass ``self.log_ratio`` if the step sets no weight to 0.
        """
        changed = weights != self.weights
        clipped = changed if self.clipped is None else self.clipped | changed
        records = (*self.step_records, StepRecord(self.step, "clipped", self.unit, changed))
        return type(self)(weights, self.keep, self.unit, clipped, records, self.step, log_ratio)

    def reject(self, unit: Unit, inside: Tensor) -> State:
        """Keeps the units that are ``inside``, rejects the others, and records both."""
        # Rejections commute, because flags are combined and weights stay. The record has this step's flags
        # alone: metrics count what it rejects by itself, and what it and the steps before it keep.
        kept = self.keep[unit] & inside if unit in self.keep else inside
        record = StepRecord(self.step, "kept", unit, inside)
        keep, records = {**self.keep, unit: kept}, (*self.step_records, record)
        return type(self)(self.weights, keep, self.unit, self.clipped, records, self.step, self.log_ratio)


@dataclass(frozen=True)
class StepInputs(Quantities):
    """What a step may read; every step gets the same inputs."""

    # ages is [S], the trainer's weight version minus the sample's. age_steps is [S], the optimizer steps
    # since the sample's weights. Both are NaN where unknown. Only a step that declares a field in ``needs``
    # may read it, and the same goes for advantages.
    ages: Tensor = ABSENT
    age_steps: Tensor = ABSENT
    units: tuple[Unit, ...] = ()  # the units that one non-finite behavior log-prob rejects as a whole
    table: Mapping[StatisticKey, Tensor] = field(default_factory=dict)  # [S] or [U] float64 each
    plan: Mapping[Step, Tensor] = field(default_factory=dict)  # coupled step -> its number for the whole step

    def with_units(self, units: tuple[Unit, ...]) -> StepInputs:
        """Returns the inputs of a correction that rejects other units as a whole; both share the ratio."""
        other = replace(self, units=units)
        vars(other)["ratio"] = self.ratio
        return other

    def total(self, unit: Unit, aggregate: Aggregate, name: str) -> Tensor:
        """Reads a declared statistic, one number per unit.

        At unit token it is the quantity itself, which is undefined at masked tokens.

        Raises:
            ConfigError: an unknown unit, aggregate or quantity, or a statistic that no step declares.
        """
        keys = statistics_of(unit, aggregate, name)
        if unit == "token":
            return self.advantages if name == "advantage" else self.value_of(name)
        try:
            total, *count = [self.table[key] for key in keys]
        except KeyError:
            said = f"({unit!r}, {aggregate!r}, {name!r})"
            raise ConfigError(
                f"statistics: expected what inputs.total{said} reads, got none: add statistics_of{said} to "
                "statistics"
            ) from None
        return total / count[0].clamp_min(1) if count else total

    def aggregate(self, unit: Unit, aggregate: Aggregate, values: Tensor) -> Tensor:
        """Aggregates your own values [T] over each unit's response tokens.

        ``aggregate`` is sum, mean or max. The tokens of all ranks count. Each call costs one more all-reduce;
        ``total`` costs none.

        Returns:
            One float64 per unit.

        Raises:
            ConfigError: an unknown unit or aggregate.
        """
        check_words(unit, aggregate)
        if unit == "token":
            return values
        return {"sum": self.segments.sum, "mean": self.segments.mean, "max": self.segments.max}[aggregate](
            values, unit
        )

    def prefix(self, unit: Unit, aggregate: Literal["sum", "mean"], values: Tensor) -> Tensor:
        """Aggregates your own values [T] over each token's prefix in its unit.

        ``aggregate`` is sum or mean. The prefix holds the unit's response tokens up to and including the
        token. The result is as exact as that of the method ``aggregate``.

        Returns:
            [T] float64.
        """
        check_words(unit, aggregate, ("sum", "mean"))
        if unit == "token":
            return values
        return {"sum": prefix_sum, "mean": prefix_mean}[aggregate](self.segments, values, unit)

    @cached_property
    def start(self) -> State:
        """The state before any step.

        All weights are 1, and units with a non-finite behavior log-prob are rejected.
        """
        keep: dict[Unit, Tensor] = {"token": self.finite}
        for unit in self.units:
            finite, count = (self.table[StatisticKey("sum", unit, name)] for name in ("finite", "count"))
            keep[unit] = finite == count
        records = (StepRecord(BEFORE, "kept", unit, kept) for unit, kept in keep.items() if unit != "token")
        return State(torch.ones_like(self.log_ratio), keep, step_records=tuple(records))

    def kept(self, state: State) -> Tensor:
        """Returns the response tokens that a state keeps: [T] bool."""
        return functools.reduce(
            operator.and_, (self.segments.expand_to_tokens(unit, kept) for unit, kept in state.keep.items())
        )

    @cached_property
    def usable(self) -> Tensor:
        """The tokens that the state before any step keeps, [T] bool."""
        return self.kept(self.start)


class WeightRange(NamedTuple):
    """The range of the weights, whatever the log-ratios are.

    Args:
        low, high: the smallest and the largest possible weight.
        ratio: unit and aggregate of the ratio that the weights equal; None if they equal no ratio that a step
            can read.
    """

    low: float = 1.0
    high: float = 1.0
    ratio: tuple[Unit, str] | None = None

    def clamped(self, low: float, high: float) -> WeightRange:
        """Returns the range after bounds."""
        return self._replace(low=min(max(self.low, low), high), high=max(min(self.high, high), low))


class Effect(Enum):
    """What a step does, named after the method of ``State`` that it calls."""

    REWEIGHT = "reweight"
    BOUND = "bound"
    REJECT = "reject"


class Step:
    """The interface of a step.

    The defaults describe a step that needs only per-token values. A subclass replaces the properties by class
    attributes, or by properties that read its fields. (If they were plain attributes here, a type
    checker would refuse the properties.)
    """

    @property
    def unit(self) -> Unit:
        """The unit that one non-finite behavior log-prob rejects as a whole."""
        return "token"

    @property
    def statistics(self) -> tuple[StatisticKey, ...]:
        """The statistics that the call reads with ``StepInputs.total``."""
        return ()

    @property
    def needs(self) -> frozenset[Need]:
        """What the call reads besides log-probs: ``ADVANTAGES``, ``AGES``, ``AGE_STEPS``, ``WHOLE_STEP``.

        With ``WHOLE_STEP`` it reads ``inputs.plan[self]``, which ``number_for_step`` computes over the
        optimizer step.
        """
        return frozenset()

    @property
    def effects(self) -> frozenset[Effect]:
        """What the call does to weights and flags."""
        return frozenset()

    @property
    def raises_zero(self) -> bool:
        """Whether the call makes a weight of 0 larger, as a lower bound does.

        A step that ``sets_zero`` must not come before such a step.
        """
        return False

    @property
    def sets_zero(self) -> bool:
        """Whether the call sets weights to 0 because of something other than their size.

        ``zero_outside`` does it because of a ratio. Beside ``center``, the unit of such a step says whether
        it acts on single tokens, while a bound of the weights goes where they go.
        """
        return False

    def weight_range(self, before: WeightRange) -> WeightRange:
        """Returns the range of the weights after this step.

        A user's bounding step is trusted to leave modest weights.
        """
        if Effect.BOUND in self.effects:
            return WeightRange(0.0, MODEST)
        return WeightRange(0.0, math.inf) if Effect.REWEIGHT in self.effects else before

    def number_for_step(self, batches: Batches, all_sum: AllSum) -> Tensor:
        """Computes a coupled step's number over all micro-batches of the optimizer step.

        Every call reads it as ``inputs.plan[self]``.

        Args:
            batches: for each micro-batch on this rank, the state before this step and the step's inputs.
            all_sum: SUM over all ranks that train the step, each token once.

        Returns:
            [] float64.
        """
        raise NotImplementedError

    def __call__(self, state: State, inputs: StepInputs) -> State:
        """Returns the state after this step.

        It must neither read a tensor's value nor write to a tensor.
        """
        raise NotImplementedError


Batches = Sequence[tuple[State, StepInputs]]
OF_STEPS = (Need.ADVANTAGES, Need.WHOLE_STEP, Need.AGES, Need.AGE_STEPS)


def check_declared(step: Step, where: str) -> None:
    """Raises ConfigError unless ``needs`` and ``effects`` hold what a step can need and do.

    Its unit and the words of its statistics must be known. Statistics of the advantage belong to ``needs``,
    too.
    """
    check_known(f"{where}.unit", "unit", step.unit, get_args(Unit))
    for key in step.statistics:
        check_known(f"{where}.statistics", "aggregate", key.aggregate, get_args(Share))
        check_known(f"{where}.statistics", "unit", key.unit, ("turn", "sequence"))
    for name, known in {"needs": OF_STEPS, "effects": tuple(Effect)}.items():
        members = getattr(step, name)
        wanted = f"a frozenset of {', '.join(map(str, known))}"
        is_set = isinstance(members, Set) and all(member in known for member in members)
        example = f"write {name} = frozenset({{{known[0]}}})"
        expect(is_set, f"{where}.{name}", wanted, quoted(members), example)
    names = [getattr(key.name, "name", key.name) for key in step.statistics]
    is_said, why = Need.ADVANTAGES in step.needs, "add it, because not every host has advantages"
    wanted = f"{Need.ADVANTAGES} beside a statistic of advantage"
    expect(is_said or "advantage" not in names, f"{where}.needs", wanted, "none", why)


def only_bounds(step: Step) -> bool:
    """Tells whether a step bounds weights but sets none.

    Another step must then set them before it.
    """
    return Effect.BOUND in step.effects and Effect.REWEIGHT not in step.effects


def weight_ranges(steps: Sequence[Step]) -> list[WeightRange]:
    """Returns the range of the weights before each step, and after the last one."""
    ranges = [WeightRange()]
    for step in steps:
        ranges.append(step.weight_range(ranges[-1]))
    return ranges
