"""Steps of a correction: frozen dataclasses, fields are the configuration, calling one is the mathematics.

A step reads facts (log-ratios and the statistics it asked for, always over the host's response mask) and
hands on a state: weights and keep. Rejections therefore commute; weights follow the order in which they are
written. On-policy data (ratio 1) leaves every step as it entered.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from slime_ext.coupled import Normalize, SecondMoment
from slime_ext.facts import Aggregate, Facts, State, Step, expect, needs_of
from slime_ext.ops.prefixes import prefix_min
from slime_ext.ops.ratios import Level
from slime_ext.ops.segments import is_traced
from slime_ext.ops.statistics import Need, Over, Unit

Statistic = Literal["ratio", "k1", "k2", "k3", "binary_kl", "binary_kl_max", "tv"]
When = Literal["always", "negative_advantage", "outward"]
KEPT = "on-policy data must be kept"


class _AtLevel(Step):
    """A step that turns the importance ratio at ``level`` into weights."""

    level: Level

    @property
    def unit(self) -> Unit:
        return "sequence" if self.level == "geometric" else self.level

    @property
    def needs(self) -> tuple[Need, ...]:
        return needs_of(self.unit, self._aggregate, "ratio")

    @property
    def _aggregate(self) -> Aggregate:
        return "mean" if self.level == "geometric" else "sum"

    def _ratio(self, facts: Facts) -> Tensor:
        """exp(log-ratio), one per unit."""
        total = facts.total(self.unit, self._aggregate, "ratio")
        if total.dtype is facts.log_ratio.dtype or is_traced(total):
            return total.exp().to(facts.log_ratio.dtype)
        return torch.exp(total, out=total.new_empty(total.shape, dtype=facts.log_ratio.dtype))


@dataclass(frozen=True)
class Reweight(_AtLevel):
    """Sets the weights to the importance ratio at ``level``.

    token: each token's own ratio; turn, sequence: the product over the unit; geometric: exp(mean log-ratio of
    the sequence). Sequence weights are the unbiased ones, with a variance that grows exponentially with
    length.

    Source: token: Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; sequence: Liu and Li 2025,
    https://richardli.xyz/rl-collapse; turn: ST-PPO, https://arxiv.org/abs/2511.20718; geometric: GSPO,
    https://arxiv.org/abs/2507.18071.
    """

    level: Level = "token"

    def __call__(self, state: State, facts: Facts) -> State:
        return state.reweight(self.unit, self._ratio(facts))


@dataclass(frozen=True)
class MinPrefixReweight(Step):
    """Sets the weights to w_t = rho_t times the smallest rho_i of the response tokens i < t (1 if there are
    none).

    A surrogate of the prefix product that does not accumulate.

    Source: MinPRO, https://arxiv.org/abs/2601.22718 (definition as in the design; only its abstract was at
    hand).
    """

    unit = "sequence"
    needs = (Need("slots", "sequence", "ratio"),)

    def __call__(self, state: State, facts: Facts) -> State:
        lowest = prefix_min(facts.segments, facts.log_ratio, facts.table[self.needs[0]])
        before = lowest.nan_to_num_(math.nan, posinf=0, neginf=0)
        return state.reweight("token", (facts.log_ratio + before).exp())


@dataclass(frozen=True)
class Taper(_AtLevel):
    """Sets weights by the advantage's sign: clip(ratio, low, high), the range of positive or of negative
    advantages.

    With the defaults it is TOPR: weight 1 where A >= 0, clip(sequence ratio, 0, 1) where A < 0.

    Source: Le Roux et al. 2025, https://arxiv.org/abs/2503.14286.
    """

    level: Level = "sequence"
    positive_low: float = 1.0
    positive_high: float = 1.0
    negative_low: float = 0.0
    negative_high: float = 1.0

    reads_advantages = True
    is_bound = True

    def __post_init__(self) -> None:
        for sign in ("positive", "negative"):
            low, high = getattr(self, f"{sign}_low"), getattr(self, f"{sign}_high")
            expect(0 <= low <= 1 <= high, f"taper.{sign}", "0 <= low <= 1 <= high", [low, high], KEPT)

    def __call__(self, state: State, facts: Facts) -> State:
        ratio = facts.spread(self.unit, self._ratio(facts))
        positive = ratio.clamp(self.positive_low, self.positive_high)
        negative = ratio.clamp(self.negative_low, self.negative_high)
        return state.reweight("token", ratio).bound(torch.where(facts.advantages < 0, negative, positive))


@dataclass(frozen=True)
class Truncate(Step):
    """Caps the weights from above: w = min(w, high), exactly ``high`` where it acts.

    Biases the gradient towards the behavior policy; in return no weight is larger than the cap.

    Source: Espeholt et al. 2018, IMPALA, https://arxiv.org/abs/1802.01561 (the clipped rho of V-trace).
    """

    high: float = 2.0

    is_bound = True

    def __post_init__(self) -> None:
        expect(
            self.high >= 1,
            "truncate.high",
            "a number >= 1",
            self.high,
            "below 1 it would shrink on-policy tokens",
        )

    def __call__(self, state: State, facts: Facts) -> State:
        return state.bound(state.weights.clamp(max=self.high))


@dataclass(frozen=True)
class Clip(Step):
    """Bounds the weights on both sides: w = min(max(w, low), high); ``low`` 0 means none.

    Source: MiniMax-M1, https://arxiv.org/abs/2506.13585 (CISPO's weight).
    """

    low: float = 0.5
    high: float = 2.0

    is_bound = True

    def __post_init__(self) -> None:
        expect(
            0 <= self.low <= 1, "clip.low", "a number in [0, 1]", self.low, "it would raise on-policy tokens"
        )
        expect(self.high >= 1, "clip.high", "a number >= 1", self.high, "it would shrink on-policy tokens")

    def __call__(self, state: State, facts: Facts) -> State:
        return state.bound(state.weights.clamp(self.low, self.high))


@dataclass(frozen=True)
class Reject(Step):
    """Drops the units whose statistic leaves [low, high]; both ends are inside, None means unbounded.

    ``ratio`` is aggregated before the exponential: sum is the product over the unit, mean the geometric mean,
    max the largest ratio. At unit token nothing is aggregated. ``when`` limits the rejection:
    ``negative_advantage`` to units whose mean advantage is negative, ``outward`` to those whose mean
    advantage and log-ratio have the same sign, so that the update would push the ratio further out.
    ``max_staleness`` also drops whole sequences sampled by weights that are more versions older than that,
    whatever ``when`` says; a sequence of unknown age stays.

    Source: token ratio: IcePop, https://arxiv.org/abs/2510.18855; sequence and geometric: Liu and Li 2025,
    https://richardli.xyz/rl-collapse; divergences: TRM, https://arxiv.org/abs/2512.23075; negative_advantage:
    DeepSeek-V3.2, https://arxiv.org/abs/2512.02556; outward: DPPO, https://arxiv.org/abs/2602.04879.
    """

    unit: Unit = "token"
    statistic: Statistic = "ratio"
    aggregate: Literal["sum", "mean", "max"] = "mean"
    low: float | None = None
    high: float | None = None
    when: When = "always"
    max_staleness: int | None = None

    rejects = True

    def __post_init__(self) -> None:
        neutral = 1 if self.statistic == "ratio" else 0
        bounds = [self.low, self.high]
        expect(
            bounds != [None, None] or self.max_staleness is not None,
            "reject",
            "low or high or both",
            "neither",
            "nothing would be rejected",
        )
        stale = self.max_staleness
        expect(stale is None or stale >= 0, "reject.max_staleness", "a number >= 0", stale, KEPT)
        low, high = self._interval
        expect(low <= neutral <= high, "reject", f"low <= {neutral} <= high", bounds, KEPT)

    @property
    def reads_advantages(self) -> bool:
        return self.when != "always"

    @property
    def reads_ages(self) -> bool:
        return self.max_staleness is not None

    @property
    def needs(self) -> tuple[Need, ...]:
        if not self._reads_ratio:
            return ()
        own = (self._over,) if self._over else needs_of(self.unit, self.aggregate, self.statistic)
        if self.when == "always":
            return own
        signs = ("advantage",) if self.when == "negative_advantage" else ("advantage", "ratio")
        return own + tuple(need for name in signs for need in needs_of(self.unit, "sum", name))

    def __call__(self, state: State, facts: Facts) -> State:
        if self.max_staleness is not None:
            state = state.reject("sequence", ~(facts.ages > self.max_staleness))
        if not self._reads_ratio:
            return state
        inside = self._inside(facts)
        if self.when != "always":
            inside = inside >= self._applies(facts)  # or it does not apply
        return state.reject(self.unit, inside)

    @property
    def _reads_ratio(self) -> bool:
        return (self.low, self.high) != (None, None)

    def _inside(self, facts: Facts) -> Tensor:
        if self._over:
            return facts.table[self._over] == 0
        low, high = self._limits
        value = facts.total(self.unit, self.aggregate, self.statistic)
        if low == -math.inf:
            return value <= high
        return value.clamp(low, high) == value  # false for NaN, too

    @property
    def _over(self) -> Need | None:
        """A maximum with an upper bound alone needs no maximum: no token may exceed it."""
        if self.unit == "token" or self.aggregate != "max" or self.low is not None:
            return None
        return Need("sum", self.unit, Over(self.statistic, self._limits[1]))

    @property
    def _interval(self) -> tuple[float, float]:
        low = -math.inf if self.low is None else self.low
        return low, math.inf if self.high is None else self.high

    @property
    def _limits(self) -> tuple[float, float]:
        """The interval as the statistic is compared with it: logarithms for ratios."""
        low, high = self._interval
        return (_log(low), _log(high)) if self.statistic == "ratio" else (low, high)

    def _applies(self, facts: Facts) -> Tensor:
        advantage = facts.total(self.unit, "sum", "advantage")
        if self.when == "negative_advantage":
            return advantage < 0
        return advantage * facts.total(self.unit, "sum", "ratio") > 0


@dataclass(frozen=True)
class Veto(Step):
    """Drops a whole sequence because of one response token whose ratio is below ``low`` or above ``high``.

    Source: verl PR 3984 (rollout_token_veto_threshold); SkyRL PR 849 (outlier_token_is_threshold).
    """

    low: float | None = None
    high: float | None = None

    unit = "sequence"
    rejects = True

    def __post_init__(self) -> None:
        bounds = [self.low, self.high]
        expect(bounds != [None, None], "veto", "low or high or both", "neither", "nothing would be vetoed")
        low, high = self._interval
        expect(low <= 1 <= high, "veto", "low <= 1 <= high", bounds, KEPT)

    @property
    def needs(self) -> tuple[Need, ...]:
        low = () if self.low is None else (Over("k1", -_log(self.low)),)
        high = () if self.high is None else (Over("ratio", _log(self.high)),)
        return tuple(Need("sum", "sequence", over) for over in low + high)

    def __call__(self, state: State, facts: Facts) -> State:
        for need in self.needs:
            state = state.reject("sequence", facts.table[need] == 0)
        return state

    @property
    def _interval(self) -> tuple[float, float]:
        return 0.0 if self.low is None else self.low, math.inf if self.high is None else self.high


STEPS: dict[str, Callable[..., Step]] = {
    "reweight": Reweight,
    "min_prefix_reweight": MinPrefixReweight,
    "taper": Taper,
    "truncate": Truncate,
    "clip": Clip,
    "reject": Reject,
    "veto": Veto,
    "second_moment": SecondMoment,
    "normalize": Normalize,
}


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf
