"""Defines the data of a correction, from ``Tokens`` and a ``Plan`` to an ``Outcome``.

In between, each step reads ``StepInputs``, which never change, and returns a ``State`` of weights and keep
flags.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from slime_ext.core.needs import Need
from slime_ext.errors import ConfigError, check_known, shown
from slime_ext.ops import divergences
from slime_ext.ops.prefixes import prefix_mean, prefix_sum, response_order, shard_sums
from slime_ext.ops.segments import AllSum, Segments, as_numbers, highest, identity, selected

Unit = Literal["token", "turn", "sequence"]
Level = Literal["token", "turn", "sequence", "geometric"]
Aggregate = Literal["sum", "mean", "max"]
Share = Literal["sum", "max", "by_shard", "shard_sum"]  # what ranks add up of a statistic
BEFORE = -1  # the ``step`` of effects that come before the first step
ABSENT = cast(Tensor, None)  # the value of a field that is not passed
MODEST = 2.0**32  # a weight up to this number times a loss of ordinary size is finite in float32
TOKEN_NAMES = ("ratio", *divergences.OF_RATIO, *divergences.OF_BOTH, "advantage", "count", "finite")


@dataclass(frozen=True)
class Head:
    """The sampler's K most likely tokens at each of T positions.

    The log-probs are normalised over the whole vocabulary.
    """

    sampler: Tensor  # [T, K] log-probs, nats; -inf where a head is shorter
    trainer: Tensor  # [T, K] log-probs of the same tokens under the policy being trained, nats, with grad
    proximal: Tensor | None = None  # [T, K] under the proximal policy; None: equal to the trainer's


@dataclass(frozen=True)
class Support:
    """All tokens that the sampler could draw at each of T positions, N in total.

    With a support, every log-prob is normalised over the support, including those of ``Tokens``. So the ratio
    of a sampled token compares the two policies after top-p or top-k has cut them to the support.
    """

    sampler: Tensor  # [N] log-probs, nats
    trainer: Tensor  # [N] log-probs of the same tokens under the policy being trained, nats, with grad
    offsets: Tensor  # [T + 1] int64: position t has tokens offsets[t] to offsets[t + 1] - 1, or none
    proximal: Tensor | None = None  # [N] under the proximal policy; None: equal to the trainer's


@dataclass(frozen=True)
class Tokens:
    """The packed response tokens [T] that a correction reads; masked positions may hold anything."""

    segments: Segments
    proximal: Tensor  # log-probs under the trainer's frozen policy, nats
    behavior: Tensor  # log-probs under the policy that sampled the tokens, nats
    target: Tensor | None = None  # log-probs under the policy that is being trained, nats, with grad
    advantages: Tensor | None = None
    ages: Tensor | None = None  # [S] trainer's weight version minus the sample's; NaN where unknown
    head: Head | Support | None = None  # what ``center`` reads
    age_steps: Tensor | None = None  # [S] optimizer steps since the sample's weights; NaN where unknown


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


class StepEffect(NamedTuple):
    """What one step did to each unit, independently of the other steps.

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
    keep: Tensor  # bool, false where a step or the plan rejected the whole sequence


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
    step_effects: tuple[StepEffect, ...] = ()  # what each step did, in order
    sequences: SequenceStatistics | None = None  # None unless observed
    numbers: Mapping[Step, Tensor] = field(default_factory=dict)  # the plan's, which terms read
    head_factor: Tensor | None = None  # [T] what multiplies C_t; None without ``center``


class State(NamedTuple):
    """Weights and keep flags between two steps."""

    weights: Tensor  # one per ``unit``, which multiplies the loss; a ratio until a step bounds it
    keep: Mapping[Unit, Tensor]  # unit -> bool per unit, false where rejected; it always has the unit token
    unit: Unit = "token"  # the unit that has one weight and one clipped flag
    clipped: Tensor | None = None  # bool, shaped like the weights: where a bound changed them; None: nowhere
    step_effects: tuple[StepEffect, ...] = ()
    step: int = BEFORE  # the place of the step that is running
    log_ratio: Tensor | None = None  # shaped like the weights: the log of a weight that under- or overflows

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

    def reweight(self, unit: Unit, ratio: Tensor, log_ratio: Tensor | None = None) -> State:
        """Replaces the weights by one ratio per unit.

        Args:
            log_ratio: the log of the ratios, which coupled steps read. None: they read the log of ``ratio``,
                and cannot tell apart ratios that have become 0 or infinite.
        """
        return self._replace(weights=ratio, unit=unit, clipped=None, log_ratio=log_ratio)

    def bound(self, weights: Tensor, log_ratio: Tensor | None = None) -> State:
        """Replaces the weights by bounded ones and records where they changed.

        Args:
            log_ratio: as in ``reweight``; pass ``self.log_ratio`` if the step sets no weight to 0.
        """
        changed = weights != self.weights
        clipped = changed if self.clipped is None else self.clipped | changed
        effects = (*self.step_effects, StepEffect(self.step, "clipped", self.unit, changed))
        return self._replace(weights=weights, clipped=clipped, step_effects=effects, log_ratio=log_ratio)

    def reject(self, unit: Unit, inside: Tensor) -> State:
        """Keeps the units that are ``inside``, rejects the others, and records both."""
        # Rejections commute, because flags are combined and weights stay. The effect has this step's flags
        # alone: metrics count what it rejects by itself, and what it and the steps before it keep.
        kept = self.keep[unit] & inside if unit in self.keep else inside
        effect = StepEffect(self.step, "kept", unit, inside)
        return self._replace(keep={**self.keep, unit: kept}, step_effects=(*self.step_effects, effect))


class ExceedsLimit(NamedTuple):
    """max(quantity - limit, 0) per token.

    Its sum over a unit is 0 exactly when no token exceeds the limit.
    """

    name: str
    limit: float


class ByPosition(NamedTuple):
    """A token's quantity ``name``, times the number of earlier response tokens of its sequence."""

    name: str


class StatisticKey(NamedTuple):
    """One statistic: ``aggregate`` of the quantity ``name`` over each unit's response tokens.

    ``by_shard`` and ``shard_sum`` have one number per shard of a sequence, [S, shards_per_sequence].
    ``by_shard`` is the maximum of the negative quantity, for ``prefix_min``. ``shard_sum`` is the sum of the
    quantity, for ``prefix_sums``.
    """

    aggregate: Share
    unit: Unit  # turn or sequence
    name: str | ExceedsLimit | ByPosition


@dataclass(frozen=True)
class StepInputs:
    """What a step may read; every step gets the same inputs."""

    segments: Segments
    log_ratio: Tensor  # [T] log numerator - log behavior, nats, 0 where there is none
    finite: Tensor  # [T] bool, response tokens with a behavior log-prob (``is_log_prob``)
    numerator: Tensor  # [T] log-probs, nats; anything where not finite
    behavior: Tensor  # [T] log-probs, nats; anything where not finite
    # advantages is [T], anything at masked tokens. ages is [S], the trainer's weight version minus the
    # sample's. age_steps is [S], the optimizer steps since the sample's weights. Both are NaN where unknown.
    # Only a step that declares a field in ``needs`` may read it.
    advantages: Tensor = ABSENT
    ages: Tensor = ABSENT
    age_steps: Tensor = ABSENT
    units: tuple[Unit, ...] = ()  # the units that one non-finite behavior log-prob rejects as a whole
    table: Mapping[StatisticKey, Tensor] = field(default_factory=dict)  # [S] or [U] float64 each
    plan: Mapping[Step, Tensor] = field(default_factory=dict)  # coupled step -> its number for the whole step

    def value_of(self, name: str | ExceedsLimit | ByPosition) -> Tensor:
        """Computes the quantity that a statistic's name means: [T], 0 at masked tokens."""
        row = self.row_of(name)
        return as_numbers(row, self.log_ratio.dtype) if row.dtype is torch.bool else row

    def row_of(self, name: str | ExceedsLimit | ByPosition) -> Tensor:
        """Computes the same as ``value_of``, but leaves flags bool.

        A sum of bool needs no copy in float32.
        """
        if isinstance(name, ExceedsLimit):
            return self._minus_limit(name).clamp_min_(0)
        if isinstance(name, ByPosition):
            return (response_order(self.segments) - 1) * self.value_of(name.name).double()
        if name in divergences.OF_RATIO:
            return divergences.OF_RATIO[name](self.log_ratio)
        if name in divergences.OF_BOTH:
            return selected(divergences.OF_BOTH[name](self.numerator, self.behavior), self.finite)
        if name == "advantage":
            return self.segments.zeroed(self.advantages)
        if name == "ratio":
            return self.log_ratio
        flags = {"count": self.segments.mask, "finite": self.finite}
        if name not in flags:
            check_known("statistics", "quantity", name, TOKEN_NAMES)
        return flags[name]

    def _minus_limit(self, of: ExceedsLimit) -> Tensor:
        if of.name == "k1":  # -limit - l takes one pass less than (-l) - limit, and has the same bits
            return torch.rsub(self.log_ratio, -of.limit)
        return self.value_of(of.name) - of.limit

    def total(self, unit: Unit, aggregate: Aggregate, name: str) -> Tensor:
        """Reads a declared statistic, one number per unit.

        At unit token it is the quantity itself, which is undefined at masked tokens.

        Raises:
            ConfigError: an unknown unit, aggregate or quantity, or a statistic that no step declares.
        """
        keys = statistics_of(unit, aggregate, name)
        if unit == "token":
            return self.advantages if name == "advantage" else self.value_of(name)
        if any(key not in self.table for key in keys):
            said = f"({unit!r}, {aggregate!r}, {name!r})"
            why = f"add statistics_of{said} to statistics"
            expect(False, "statistics", f"what inputs.total{said} reads", "none", why)
        total, *count = (self.table[key] for key in keys)
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
        _check_words(unit, aggregate)
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
        _check_words(unit, aggregate, ("sum", "mean"))
        if unit == "token":
            return values
        return {"sum": prefix_sum, "mean": prefix_mean}[aggregate](self.segments, values, unit)

    @cached_property
    def ratio(self) -> Tensor:
        """numerator / behavior, [T]; 1 where there is no log-ratio."""
        return self.log_ratio.exp()

    @cached_property
    def start(self) -> State:
        """The state before any step.

        All weights are 1, and units with a non-finite behavior log-prob are rejected.
        """
        keep: dict[Unit, Tensor] = {"token": self.finite}
        for unit in self.units:
            finite, count = (self.table[StatisticKey("sum", unit, name)] for name in ("finite", "count"))
            keep[unit] = finite == count
        effects = (StepEffect(BEFORE, "kept", unit, kept) for unit, kept in keep.items() if unit != "token")
        return State(torch.ones_like(self.log_ratio), keep, step_effects=tuple(effects))

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


GONE = {  # former attributes of a step -> what to write now
    "reads_advantages": "needs = frozenset({Need.ADVANTAGES})",
    "reads_ages": "needs = frozenset({Need.AGES})",
    "reads_age_steps": "needs = frozenset({Need.AGE_STEPS})",
    "is_coupled": "needs = frozenset({Need.WHOLE_STEP})",
    "sets_weights": "effects = frozenset({Effect.REWEIGHT})",
    "is_bound": "effects = frozenset({Effect.BOUND})",
    "rejects": "effects = frozenset({Effect.REJECT})",
}


class Step:
    """The interface of a step.

    The defaults describe a step that needs only per-token values. A subclass replaces the four properties by
    class attributes, or by properties that read its fields. (If they were plain attributes here, a type
    checker would refuse the properties.)

    Raises:
        ConfigError: a subclass has an attribute of ``GONE``, which nothing reads. Or it annotates one of the
            four without a value, so that ``dataclass`` would take the property here as the default.
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

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, instead in GONE.items():
            if hasattr(cls, name):
                raise ConfigError(
                    f"{cls.__qualname__}.{name}: expected {instead}, got the attribute's former name: import "
                    f"{instead.partition('{')[2].partition('.')[0]} from slime_ext.steps"
                )
        for name in vars(cls).get("__annotations__", ()):
            if name in vars(Step) and getattr(cls, name) is vars(Step)[name]:
                raise ConfigError(
                    f"{cls.__qualname__}.{name}: expected a value beside the annotation, got none: write "
                    f"{name}: ... = ..."
                )

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
        expect(is_set, f"{where}.{name}", wanted, shown(members), example)
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


@functools.cache  # because ``StepInputs.total`` asks in every call of every hook
def statistics_of(unit: Unit, aggregate: Aggregate, name: str) -> tuple[StatisticKey, ...]:
    """Returns the statistics that ``StepInputs.total`` reads for the same arguments.

    Raises:
        ConfigError: an unknown unit, aggregate or quantity.
    """
    _check_words(unit, aggregate)
    check_known("statistics", "quantity", name, TOKEN_NAMES)
    if unit == "token":
        return ()
    if aggregate == "mean":
        return StatisticKey("sum", unit, name), StatisticKey("sum", unit, "count")
    return (StatisticKey(aggregate, unit, name),)


def _check_words(unit: str, aggregate: str, aggregates: Sequence[str] = get_args(Aggregate)) -> None:
    check_known("statistics", "unit", unit, get_args(Unit))
    check_known("statistics", "aggregate", aggregate, aggregates)


def tabulate(keys: Sequence[StatisticKey], inputs: StepInputs) -> dict[StatisticKey, Tensor]:
    """Computes every statistic, one number per unit.

    It takes one pass over the tokens, and at most one call of ``all_sum``.

    Returns:
        key -> [S] or [U] float64; maxima of a unit without response tokens are -inf.
    """
    segments = inputs.segments
    sums = [key for key in keys if key.aggregate == "sum" and key.unit == "sequence"]
    others = [key for key in keys if key not in sums]
    shares = [_share(key, inputs) for key in others]
    if sums:
        shares.append(segments.local_sums([inputs.row_of(key.name) for key in sums]))
    if shares and segments.all_sum is not identity:
        summed = segments.all_sum(torch.cat([share.reshape(-1) for share in shares]))
        parts = torch.split(summed, [share.numel() for share in shares])
        shares = [part.view(share.shape) for part, share in zip(parts, shares, strict=True)]
    table = {
        key: highest(key.unit, share) if key.aggregate == "max" else share
        for key, share in zip(others, shares, strict=False)
    }
    return table | dict(zip(sums, shares[-1].unbind() if sums else (), strict=True))


def _share(key: StatisticKey, inputs: StepInputs) -> Tensor:
    """Computes this rank's share of a statistic over turns, or of a maximum."""
    segments, values = inputs.segments, inputs.value_of(key.name)
    if key.aggregate == "sum":
        return segments.local_turn_sums(values)
    if key.aggregate == "shard_sum":
        return shard_sums(segments, values)
    values = torch.where(segments.mask, values if key.aggregate == "max" else -values, -torch.inf)
    return segments.local_turn_maxima(values) if key.unit == "turn" else segments.local_maxima(values)


def expect(ok: bool, where: str, expected: str, got: object, why: str) -> None:
    """Raises ConfigError in the form of all our messages, unless ``ok``."""
    if not ok:
        raise ConfigError(f"{where}: expected {expected}, got {got}: {why}")
