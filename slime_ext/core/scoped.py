"""Defines steps as other systems do.

These steps take statistics over the tokens kept so far, clamp log-ratios, or set a weight to 0 but leave its
token in the masks. The native steps read the host's response mask and clamp nothing, so their rejections
commute. Only the keys that ``slime-ext convert`` prints for other systems need these steps.

A sum over kept tokens depends on earlier steps, so it cannot be part of the correction's one all-reduce. If a
sequence lies on several ranks, ``over: kept`` or ``clamp`` with a sequence statistic costs one more
all-reduce.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from slime_ext.core.fields import check_fields
from slime_ext.core.state import Effect, State, Step, StepInputs, WeightRange
from slime_ext.core.statistics import ByPosition, ExceedsLimit, StatisticKey, tabulate
from slime_ext.core.steps import Reject, Reweight, ratio_at
from slime_ext.core.tokens import Unit
from slime_ext.errors import expect
from slime_ext.ops.segments import selected

if TYPE_CHECKING:
    from torch import Tensor

Over = Literal["response", "kept"]
CLAMPABLE = ("ratio", "k1", "k2", "k3")
LARGEST_LOG = 709.0  # nats; exp of a larger number overflows a float64


@dataclass(frozen=True)
class _KeptInputs(StepInputs):
    """Inputs whose sums and counts leave out the tokens that are not ``kept``."""

    kept_tokens: Tensor | None = None  # [T] bool

    def row_of(self, name: str | ExceedsLimit | ByPosition) -> Tensor:
        row = super().row_of(name)
        return row if self.kept_tokens is None else row.masked_fill(~self.kept_tokens, 0)


@dataclass(frozen=True)
class Scoped(Step):
    """Runs a native step over other tokens (``over``), or with log-ratios clamped to [-clamp, clamp]."""

    over: Over = "response"
    clamp: float | None = None

    native: ClassVar[Any] = Step

    def __post_init__(self) -> None:
        name = self.native.__name__.lower()
        check_fields(f"{name}.", self, Scoped)
        ok = self.clamp is None or self.clamp > 0
        expect(ok, f"{name}.clamp", "a number > 0", self.clamp, "it bounds the log-ratio on both sides")
        where, adds = f"{name}.over", self.unit != "token"
        why = "a single token has no sum; remove over"
        expect(self.over == "response" or adds, where, "response for single tokens", self.over, why)

    @property
    def statistics(self) -> tuple[StatisticKey, ...]:
        return ()

    def __call__(self, state: State, inputs: StepInputs) -> State:
        values = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs)}
        if self.clamp is not None:
            values["log_ratio"] = inputs.log_ratio.clamp(-self.clamp, self.clamp)
        scoped = _KeptInputs(**values, kept_tokens=inputs.kept(state) if self.over == "kept" else None)
        return super().__call__(
            state, replace(scoped, table={**inputs.table, **tabulate(super().statistics, scoped)})
        )

    def plain(self) -> Step:
        """Returns the equivalent native step, or this step if there is none."""
        native: Step
        if self.over == "kept" or self.clamp is not None:
            return self
        native = self.native(**{f.name: getattr(self, f.name) for f in dataclasses.fields(self.native)})
        return native


@dataclass(frozen=True)
class ScopedReweight(Scoped, Reweight):
    """Runs ``Reweight`` over the tokens that earlier steps kept, or with clamped log-ratios.

    Source: over: SkyRL PR 849; clamp: fw-ai cookbook PR 169 (+-20 per token before the mean).
    """

    native = Reweight

    def __post_init__(self) -> None:
        Reweight.__post_init__(self)
        super().__post_init__()

    def weight_range(self, before: WeightRange) -> WeightRange:
        if self.clamp is None or self._is_summed:
            plain = self.over == "response" and self.clamp is None
            return super().weight_range(before) if plain else WeightRange(0.0, math.inf)
        # If a token's ratio is inside a band around 1, so is its clamped ratio. For a mean this is not true.
        most = math.exp(min(self.clamp, LARGEST_LOG))
        return WeightRange(1 / most, most, ratio_at("token", "") if self.unit == "token" else None)

    @property
    def _is_summed(self) -> bool:
        return self.unit != "token" and self._aggregate == "sum"


@dataclass(frozen=True)
class ScopedReject(Scoped, Reject):
    """Runs ``Reject`` over the tokens that earlier steps kept, or with clamped log-ratios.

    Source: over: SkyRL PR 849; clamp: verl, compute_rollout_rejection_mask (+-20 per token).
    """

    native = Reject

    def __post_init__(self) -> None:
        Reject.__post_init__(self)
        super().__post_init__()
        ok, wanted = self.clamp is None or self.statistic in CLAMPABLE, f"one of {', '.join(CLAMPABLE)}"
        why = f"{self.statistic} reads probabilities, not log-ratios; remove clamp"
        expect(ok, "reject.clamp", f"{wanted} as the statistic", self.statistic, why)
        ok = self.over == "response" or self.aggregate != "max" or self.low is None
        why = "tokens that are not kept would count as 0; remove over"
        expect(ok, "reject.over", "response beside aggregate max with a lower bound", self.over, why)


@dataclass(frozen=True)
class ZeroOutside(Step):
    """Sets the weight to 0 where the unit's ratio leaves [low, high].

    The token stays in the masks, while ``reject`` would remove it from them. This is IcePop as in verl and
    the fw-ai cookbook.

    Source: verl PR 5722; fw-ai cookbook, TISConfig.icepop_threshold; https://arxiv.org/abs/2510.18855.
    """

    unit: Unit = "token"
    aggregate: Literal["sum", "mean"] = "sum"
    low: float = 0.5
    high: float = 2.0

    effects = frozenset({Effect.BOUND})
    sets_zero = True

    def __post_init__(self) -> None:
        check_fields("zero_outside.", self, ZeroOutside)
        ok, bounds = 0 <= self.low <= 1 <= self.high, [self.low, self.high]
        expect(ok, "zero_outside", "0 <= low <= 1 <= high", bounds, "on-policy data must keep its weight")
        why = "every weight but 1 would be 0"
        expect(self.low < self.high, "zero_outside", "low < high", bounds, why)

    @property
    def statistics(self) -> tuple[StatisticKey, ...]:
        return self._band.statistics

    def weight_range(self, before: WeightRange) -> WeightRange:
        """Returns the range of the weights after this step.

        A band on the ratio that the weights equal bounds them. A band on another ratio only adds the weight
        0.
        """
        is_of_weight = before.ratio == ratio_at(self.unit, self.aggregate)
        return before._replace(low=0.0, high=min(before.high, self.high) if is_of_weight else before.high)

    def __call__(self, state: State, inputs: StepInputs) -> State:
        inside = inputs.kept(self._band(state._replace(keep={}), inputs))
        expand = inputs.segments.expand_to_tokens
        weights = expand(state.unit, state.weights)
        clipped, log_ratio = (
            None if values is None else expand(state.unit, values)
            for values in (state.clipped, state.log_ratio)
        )
        if log_ratio is not None:  # -inf where the weight is 0, because log_weights reads it there
            log_ratio = torch.where(inside, log_ratio, -torch.inf)
        of_tokens = state._replace(weights=weights, clipped=clipped, unit="token")
        return of_tokens.bound(selected(weights, inside), log_ratio)

    @cached_property
    def _band(self) -> Reject:
        return Reject(self.unit, "ratio", self.aggregate, self.low, self.high)


FORMS: dict[str, Any] = {"reweight": ScopedReweight, "reject": ScopedReject, "zero_outside": ZeroOutside}
