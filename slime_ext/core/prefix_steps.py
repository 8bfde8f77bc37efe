"""Defines the steps that read sums and means over a token's prefix in its response.

t counts the response tokens of a sequence from 1, and l_t = log numerator - log behavior. A prefix ends with
the token itself. If ranks share a sequence, the sums of its shards are part of the correction's one
all-reduce, so any split gives the same numbers. One non-finite behavior log-prob rejects the whole sequence,
because it makes every later prefix unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch

from slime_ext.core.fields import check_fields
from slime_ext.core.needs import Need
from slime_ext.core.state import Effect, State, Step, StepInputs
from slime_ext.core.statistics import ByPosition, StatisticKey
from slime_ext.core.steps import COUNT, KEPT, Statistic, When, _log, applies, check_interval
from slime_ext.core.tokens import Unit
from slime_ext.errors import expect
from slime_ext.ops.prefixes import prefix_sums, response_order

if TYPE_CHECKING:
    from torch import Tensor

PrefixAggregate = Literal["sum", "mean"]
Growth = Literal["constant", "sqrt"]


class _OfPrefix(Step):
    """A step that reads sums over prefixes."""

    unit: Unit = "sequence"

    @staticmethod
    def _key(name: str | ByPosition) -> StatisticKey:
        return StatisticKey("shard_sum", "sequence", name)

    def _sums(self, inputs: StepInputs, name: str | ByPosition) -> Tensor:
        """Adds up a quantity over each token's prefix: [T] float64."""
        return prefix_sums(inputs.segments, inputs.value_of(name), inputs.table[self._key(name)])


@dataclass(frozen=True)
class PrefixReweight(_OfPrefix):
    """Sets the weights to the ratio of the prefix: w_t = exp(sum of l_i, i <= t).

    ``aggregate: mean`` takes the exp of the mean of the l_i instead. With the sum, w_t times -A_t log pi_t is
    unbiased if A_t sums the rewards from t on. It has less variance than with the product over the whole
    sequence.

    Source: CTPO, Zhang et al. 2026, https://arxiv.org/abs/2605.07331; its code, horizon-llm/CTPO, modes
    cum-token-cumprod and cum-token-geomean.
    """

    aggregate: PrefixAggregate = "sum"

    effects = frozenset({Effect.REWEIGHT})

    def __post_init__(self) -> None:
        check_fields("prefix_reweight.", self, PrefixReweight)

    @cached_property
    def statistics(self) -> tuple[StatisticKey, ...]:
        return (self._key("ratio"),)

    def __call__(self, state: State, inputs: StepInputs) -> State:
        value = self._sums(inputs, "ratio")
        if self.aggregate == "mean":
            value = value / response_order(inputs.segments).clamp_min(1)
        return state.reweight("token", value.exp().to(inputs.log_ratio.dtype), value)


@dataclass(frozen=True)
class PrefixReject(_OfPrefix):
    """Drops the tokens whose prefix leaves [low, high]; both ends are inside.

    A sum of t independent terms spreads as sqrt(t), so a constant band drops more and more tokens.
    ``growth: sqrt`` therefore multiplies both bounds by sqrt(t). For ``ratio`` the bounds limit the ratio
    and grow in log space: [low^sqrt(t), high^sqrt(t)]. ``when`` reads the token's own advantage and
    log-ratio.

    Source: CTPO, as ``PrefixReweight``, la_clip_low and la_clip_high with la_power 0.5.
    """

    statistic: Statistic = "ratio"
    aggregate: PrefixAggregate = "sum"
    low: float | None = None
    high: float | None = None
    growth: Growth = "constant"
    when: When = "always"

    effects = frozenset({Effect.REJECT})

    def __post_init__(self) -> None:
        check_fields("prefix_reject.", self, PrefixReject)
        there = [self.low, self.high] != [None, None]
        expect(there, "prefix_reject", "low or high or both", "neither", "nothing would be rejected")
        check_interval("prefix_reject", self.statistic, self.low, self.high)

    @cached_property
    def needs(self) -> frozenset[Need]:
        return frozenset() if self.when == "always" else frozenset({Need.ADVANTAGES})

    @cached_property
    def statistics(self) -> tuple[StatisticKey, ...]:
        return (self._key(self.statistic),)

    def __call__(self, state: State, inputs: StepInputs) -> State:
        order = response_order(inputs.segments).clamp_min(1).double()
        value = self._sums(inputs, self.statistic)
        if self.aggregate == "mean":
            value = value / order
        if self.growth == "sqrt":
            value = value / order.sqrt()
        inside = torch.ones_like(inputs.finite)
        if self.low is not None:
            inside = inside & (value >= self._limit(self.low))
        if self.high is not None:
            inside = inside & (value <= self._limit(self.high))
        if self.when != "always":
            inside = inside | ~applies(self.when, "token", inputs)
        return state.reject("token", inside)

    def _limit(self, bound: float) -> float:
        return _log(bound) if self.statistic == "ratio" else bound


@dataclass(frozen=True)
class PrefixBudget(_OfPrefix):
    """Drops the tokens whose divergence, alone or summed over the prefix, exceeds a bound.

    D_t is the statistic, T is the number of response tokens, and v_t = 1 - (1 - last) (t - 1) / (T - 1) falls
    from 1 to ``last``. Token t stays iff

        v_t D_t <= high   and   sum of v_i D_i, i <= t   <=   high + budget * sum of v_i, i < t

    The bound is tighter for early tokens, and after a prefix that has drifted. ``when`` reads the token's
    own advantage and log-ratio.

    Source: CPPO, Mao et al. 2026, https://arxiv.org/abs/2606.10968, equations 8 to 11; its code,
    Tencent-Hunyuan/UniRL, unirl/algorithms/cppo.py. That code also raises the budget of a sequence to the
    90th percentile of its D_t, up to twice ``budget``; this step does not.
    """

    statistic: Literal["tv", "k2", "k3", "binary_kl", "binary_kl_max"] = "tv"
    high: float = 0.2
    budget: float = 0.02
    last: float = 0.8
    when: When = "outward"

    effects = frozenset({Effect.REJECT})

    def __post_init__(self) -> None:
        check_fields("prefix_budget.", self, PrefixBudget)
        expect(self.high >= 0, "prefix_budget.high", "a number >= 0", self.high, KEPT)
        expect(self.budget >= 0, "prefix_budget.budget", "a number >= 0", self.budget, KEPT)
        why = "it is the weight of the last token"
        expect(0 < self.last <= 1, "prefix_budget.last", "a number in (0, 1]", self.last, why)

    @cached_property
    def needs(self) -> frozenset[Need]:
        return frozenset() if self.when == "always" else frozenset({Need.ADVANTAGES})

    @cached_property
    def statistics(self) -> tuple[StatisticKey, ...]:
        return self._key(self.statistic), self._key(ByPosition(self.statistic)), COUNT

    def __call__(self, state: State, inputs: StepInputs) -> State:
        before = (response_order(inputs.segments) - 1).clamp_min(0).double()
        count = inputs.segments.expand_to_tokens("sequence", inputs.table[COUNT])
        fall = (1 - self.last) / (count - 1).clamp_min(1)
        weighted = (1 - fall * before) * inputs.value_of(self.statistic)
        # sum of v_i D_i = sum of D_i - fall * sum of (i - 1) D_i, and likewise with D = 1.
        spent = self._sums(inputs, self.statistic)
        spent = spent - fall * self._sums(inputs, ByPosition(self.statistic))
        granted = before - fall * before * (before - 1) / 2
        inside = (weighted <= self.high) & (spent <= self.high + self.budget * granted)
        if self.when != "always":
            inside = inside | ~applies(self.when, "token", inputs)
        return state.reject("token", inside)


PREFIX_STEPS: dict[str, Callable[..., Step]] = {
    "prefix_reweight": PrefixReweight,
    "prefix_reject": PrefixReject,
    "prefix_budget": PrefixBudget,
}
