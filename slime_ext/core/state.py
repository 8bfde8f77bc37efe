"""What a correction takes and gives, and what its steps read and hand on.

``Tokens`` and ``Plan`` go in, an ``Outcome`` comes out. In between a step reads ``StepInputs``, which never
change, and hands on a ``State`` of weights and keep flags.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from slime_ext.errors import ConfigError, check_known
from slime_ext.ops import divergences
from slime_ext.ops.prefixes import response_order, shard_sums
from slime_ext.ops.segments import Segments, as_numbers, identity

Unit = Literal["token", "turn", "sequence"]
Aggregate = Literal["sum", "mean", "max"]
BEFORE = -1  # the place of what happens before the first step
MODEST = 2.0**32  # weights up to it times any loss are finite in float32
TOKEN_NAMES = ("ratio", *divergences.OF_RATIO, *divergences.OF_BOTH, "advantage", "count", "finite")


@dataclass(frozen=True)
class Head:
    """The sampler's K most likely tokens at each of T tokens, normalised over the whole vocabulary."""

    sampler: Tensor  # [T, K] log-probs, nats; -inf where a head is shorter
    trainer: Tensor  # [T, K] log-probs of the same tokens under the policy being trained, nats, with grad


@dataclass(frozen=True)
class Tokens:
    """The packed response tokens [T] that a correction reads; masked positions may hold anything."""

    segments: Segments
    proximal: Tensor  # log-probs under the trainer's frozen policy, nats
    behavior: Tensor  # log-probs under the policy that sampled the tokens, nats
    target: Tensor | None = None  # log-probs under the policy that is being trained, nats, with grad
    advantages: Tensor | None = None
    ages: Tensor | None = None  # [S] trainer's weight version - that of the sample; NaN where unknown
    head: Head | None = None  # what ``center`` reads


@dataclass(frozen=True)
class Plan:
    """What was computed over the whole optimizer step before any of its micro-batches is trained.

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
    """What one step did to each unit, whatever the other steps do to it."""

    step: int  # its place in the list, from 0
    kind: Literal["rejected", "clipped"]
    unit: Unit
    flags: Tensor  # bool per unit


@dataclass(frozen=True)
class SequenceStatistics:
    """What metrics read per sequence, [S] each, the same on every rank that shares them."""

    log_ratio: Tensor  # float64, the sum over the response tokens with a finite behavior log-prob, nats
    count: Tensor  # float64, response tokens
    finite: Tensor  # float64, those with a finite behavior log-prob
    keep: Tensor  # bool, false where a step or the plan rejected the whole sequence


@dataclass(frozen=True)
class Outcome:
    """What a correction decided, [T] each, detached."""

    weights: Tensor  # 0 at rejected and masked tokens
    keep: Tensor  # bool, response tokens that stay in the policy loss
    finite: Tensor  # bool, response tokens whose behavior log-prob is finite
    log_ratio: Tensor  # 0 at tokens that are not finite
    clipped: Tensor  # bool, where a bound changed a weight
    factor: Tensor  # what multiplies the loss: weights, times the plan's scale where it has one
    step_effects: tuple[StepEffect, ...] = ()  # what each step did, in order
    sequences: SequenceStatistics | None = None  # None unless observed
    numbers: Mapping[Step, Tensor] = field(default_factory=dict)  # the plan's, which terms read
    head_factor: Tensor | None = None  # [T] what multiplies C_t; None without ``center``


@dataclass(frozen=True)
class State:
    """What one step hands to the next."""

    weights: Tensor  # one per ``unit``: multiplies the loss; ratios until something bounds them
    keep: Mapping[Unit, Tensor]  # unit -> bool per unit, false where it was rejected; tokens are always there
    unit: Unit = "token"  # what weights and clipped are one per
    clipped: Tensor | None = None  # bool, shaped like the weights: where a bound changed them; None: nowhere
    step_effects: tuple[StepEffect, ...] = ()
    step: int = BEFORE  # the place of the step at work

    def reweight(self, unit: Unit, ratio: Tensor) -> State:
        """Starts over with one ratio per unit."""
        return replace(self, weights=ratio, unit=unit, clipped=None)

    def bound(self, weights: Tensor) -> State:
        """Takes bounded weights, and records where they differ from those before."""
        changed = weights != self.weights
        clipped = changed if self.clipped is None else self.clipped | changed
        effect = StepEffect(self.step, "clipped", self.unit, changed)
        return replace(self, weights=weights, clipped=clipped, step_effects=(*self.step_effects, effect))

    def reject(self, unit: Unit, inside: Tensor) -> State:
        """Keeps the units that are ``inside``, and records which are not."""
        kept = self.keep[unit] & inside if unit in self.keep else inside
        effect = StepEffect(self.step, "rejected", unit, ~inside)
        return replace(self, keep={**self.keep, unit: kept}, step_effects=(*self.step_effects, effect))


class ExceedsLimit(NamedTuple):
    """By how much the quantity ``name`` exceeds ``limit``, 0 where it does not: its sum is 0 iff no token
    does."""

    name: str
    limit: float


class ByPosition(NamedTuple):
    """The quantity ``name`` times the number of response tokens before it in its sequence."""

    name: str


class StatisticKey(NamedTuple):
    """One statistic: ``aggregate`` of the per-token quantity ``name`` over the response tokens of each
    ``unit``.

    ``by_shard`` and ``shard_sum`` are [S, shards_per_sequence], the maximum of the negative quantity, or the
    sum of the quantity, in each shard of a sequence, which ``prefix_min`` and ``prefix_sums`` read.
    """

    aggregate: Literal["sum", "max", "by_shard", "shard_sum"]
    unit: Literal["turn", "sequence"]
    name: str | ExceedsLimit | ByPosition


@dataclass(frozen=True)
class StepInputs:
    """What steps may read. None of it changes from step to step."""

    segments: Segments
    log_ratio: Tensor  # [T] log numerator - log behavior, nats, 0 where there is none
    finite: Tensor  # [T] bool, response tokens whose behavior log-prob is finite
    numerator: Tensor  # [T] log-probs, nats; anything where not finite
    behavior: Tensor  # [T] log-probs, nats; anything where not finite
    advantages: Tensor | None = None  # [T]; anything at masked tokens
    ages: Tensor | None = None  # [S] trainer's weight version - that of the sample; NaN where unknown
    units: tuple[Unit, ...] = ()  # those that one non-finite behavior log-prob rejects as a whole
    table: Mapping[StatisticKey, Tensor] = field(default_factory=dict)  # [S] or [U] float64 each
    plan: Mapping[Any, Tensor] = field(default_factory=dict)  # coupled step -> its number for the whole step

    def value_of(self, name: str | ExceedsLimit | ByPosition) -> Tensor:
        """The per-token quantity [T] that a statistic's name stands for, 0 at masked tokens."""
        if isinstance(name, ExceedsLimit):
            return (self.value_of(name.name) - name.limit).clamp_min(0)
        if isinstance(name, ByPosition):
            return self.segments.zeroed(
                (response_order(self.segments) - 1) * self.value_of(name.name).double()
            )
        if name in divergences.OF_RATIO:
            return divergences.OF_RATIO[name](self.log_ratio)
        if name in divergences.OF_BOTH:
            return torch.where(self.finite, divergences.OF_BOTH[name](self.numerator, self.behavior), 0)
        if name == "advantage":
            return self.segments.zeroed(self.advantages)
        if name == "ratio":
            return self.log_ratio
        flags = {"count": self.segments.mask, "finite": self.finite}
        if name not in flags:
            check_known("statistics", "quantity", name, TOKEN_NAMES)
        return as_numbers(flags[name], self.log_ratio.dtype)

    def total(self, unit: Unit, aggregate: Aggregate, name: str) -> Tensor:
        """An aggregate per unit; at unit token the quantity itself, anything at masked tokens."""
        if unit == "token":
            return self.advantages if name == "advantage" else self.value_of(name)
        if aggregate == "mean":
            count = self.table[StatisticKey("sum", unit, "count")]
            return self.table[StatisticKey("sum", unit, name)] / count.clamp_min(1)
        return self.table[StatisticKey(aggregate, unit, name)]

    @cached_property
    def start(self) -> State:
        """The state before any step: weights of 1; units with a non-finite behavior log-prob are rejected."""
        keep: dict[Unit, Tensor] = {"token": self.finite}
        for unit in self.units:
            finite, count = (self.table[StatisticKey("sum", unit, name)] for name in ("finite", "count"))
            keep[unit] = finite == count
        rejected = (
            StepEffect(BEFORE, "rejected", unit, ~kept) for unit, kept in keep.items() if unit != "token"
        )
        return State(torch.ones_like(self.log_ratio), keep, step_effects=tuple(rejected))

    def kept(self, state: State) -> Tensor:
        """[T] bool, the response tokens that a state keeps."""
        return functools.reduce(
            operator.and_, (self.segments.expand_to_tokens(unit, kept) for unit, kept in state.keep.items())
        )

    @cached_property
    def usable(self) -> Tensor:
        """[T] bool, the tokens that the state before any step keeps."""
        return self.kept(self.start)


class WeightRange(NamedTuple):
    """Where the weights lie whatever the log-ratios are.

    Args:
        low, high: the smallest and the largest weight.
        ratio: unit and aggregate of the ratio that the weights are, until something else sets them; None: of
            none that a step could look at.
    """

    low: float = 1.0
    high: float = 1.0
    ratio: tuple[Unit, str] | None = None

    def clamped(self, low: float, high: float) -> WeightRange:
        """The range after bounds."""
        return self._replace(low=min(max(self.low, low), high), high=max(min(self.high, high), low))


class Step:
    """What the correction expects of a step; these are the answers of one that reads single tokens only."""

    unit: Unit = "token"  # what one non-finite behavior log-prob rejects with it
    statistics: tuple[StatisticKey, ...] = ()  # those that the call reads
    reads_advantages: bool = False
    reads_ages: bool = False
    sets_weights: bool = False  # whether weights start over with it
    is_bound: bool = False  # whether it bounds weights, or zeroes some
    rejects: bool = False  # whether it takes tokens out
    is_coupled: bool = False  # whether it computes a number over the whole optimizer step

    def weight_range(self, before: WeightRange) -> WeightRange:
        """Where the weights lie after it; a step of a user's own that bounds them leaves modest ones."""
        if self.is_bound:
            return WeightRange(0.0, MODEST)
        return WeightRange(0.0, math.inf) if self.sets_weights else before

    def __call__(self, state: State, inputs: StepInputs) -> State:
        raise NotImplementedError


def weight_ranges(steps: Sequence[Step]) -> list[WeightRange]:
    """Where the weights lie before each step, and after the last one."""
    found = [WeightRange()]
    for step in steps:
        found.append(step.weight_range(found[-1]))
    return found


def statistics_of(unit: Unit, aggregate: Aggregate, name: str) -> tuple[StatisticKey, ...]:
    """What ``StepInputs.total`` reads for the same arguments.

    Raises:
        ConfigError: a word that none of them knows.
    """
    words = {"unit": (unit, get_args(Unit)), "aggregate": (aggregate, get_args(Aggregate))}
    for kind, (word, known) in {**words, "quantity": (name, TOKEN_NAMES)}.items():
        check_known("statistics_of", kind, word, known)
    if unit == "token":
        return ()
    if aggregate == "mean":
        return StatisticKey("sum", unit, name), StatisticKey("sum", unit, "count")
    return (StatisticKey(aggregate, unit, name),)


def tabulate(keys: Sequence[StatisticKey], inputs: StepInputs) -> dict[StatisticKey, Tensor]:
    """Every statistic as one tensor over its units: one pass over the tokens, one call of ``all_sum`` at
    most.

    Returns:
        key -> [S] or [U] float64; maxima of a unit without response tokens are -inf.
    """
    segments = inputs.segments
    sums = [key for key in keys if key.aggregate == "sum" and key.unit == "sequence"]
    others = [key for key in keys if key not in sums]
    shares = [_share(key, inputs) for key in others]
    if sums:
        shares.append(segments.local_sums([inputs.value_of(key.name) for key in sums]))
    if shares and segments.all_sum is not identity:
        summed = segments.all_sum(torch.cat([share.reshape(-1) for share in shares]))
        parts = summed.split([share.numel() for share in shares])
        shares = [part.view(share.shape) for part, share in zip(parts, shares, strict=True)]
    table = {key: _finished(key, share) for key, share in zip(others, shares, strict=False)}
    return table | dict(zip(sums, shares[-1].unbind() if sums else (), strict=True))


def _share(key: StatisticKey, inputs: StepInputs) -> Tensor:
    """What this rank adds to a statistic over turns, or to a maximum."""
    segments, values = inputs.segments, inputs.value_of(key.name)
    if key.aggregate == "sum":
        return segments.local_turn_sums(values)
    if key.aggregate == "shard_sum":
        return shard_sums(segments, segments.zeroed(values))
    values = torch.where(segments.mask, values if key.aggregate == "max" else -values, -torch.inf)
    return segments.local_turn_maxima(values) if key.unit == "turn" else segments.local_maxima(values)


def _finished(key: StatisticKey, summed: Tensor) -> Tensor:
    """A statistic from the shares of all ranks."""
    if key.aggregate in ("sum", "by_shard", "shard_sum"):
        return summed
    if key.unit == "turn":
        summed = torch.where(summed[..., 1] > 0, summed[..., 0], -torch.inf)
    return summed.amax(1)


def expect(ok: bool, where: str, expected: str, got: object, why: str) -> None:
    """Raises ConfigError in the form of all our messages, unless ``ok``."""
    if not ok:
        raise ConfigError(f"{where}: expected {expected}, got {got}: {why}")
