"""Steps of a correction: frozen dataclasses whose fields are the configuration and whose call is the
mathematics.

A step reads facts (log-ratios and the statistics it asked for, always over the host's response mask) and
hands on a
state: weights and keep. Rejections therefore commute; weights follow the order in which they are written.
    On-policy
data (ratio 1) leaves every step as it entered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from slime_ext.errors import ConfigError
from slime_ext.ops import divergences
from slime_ext.ops.ratios import Level
from slime_ext.ops.segments import Segments
from slime_ext.ops.statistics import Need, Unit

Statistic = Literal["ratio", "k1", "k2", "k3", "binary_kl", "binary_kl_max", "tv"]
Aggregate = Literal["sum", "mean", "max"]
When = Literal["always", "negative_advantage", "outward"]


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
    numerator: Tensor  # [T]
    behavior: Tensor  # [T]
    finite: Tensor  # [T] bool, response tokens whose behavior log-prob is finite
    advantages: Tensor | None = None  # [T]
    table: Mapping[Need, Tensor] = field(default_factory=dict)

    def value_of(self, name: str) -> Tensor:
        """The per-token quantity [T] that a statistic's name stands for."""
        if name in divergences.OF_RATIO:
            return divergences.OF_RATIO[name](self.log_ratio)
        if name in divergences.OF_BOTH:
            return divergences.OF_BOTH[name](self.numerator, self.behavior)
        if name == "one":
            return torch.ones_like(self.log_ratio)
        return {"ratio": self.log_ratio, "advantage": self.advantages, "nonfinite": (~self.finite).float()}[
            name
        ]

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
            count = self.table[Need("sum", unit, "one")].clamp_min(1)
            return self.table[Need("sum", unit, name)] / count
        return self.table[Need(aggregate, unit, name)]


class Step:
    """What the correction expects of a step; these are the answers of one that looks at single tokens
    only."""

    unit: Unit = "token"  # what one non-finite behavior log-prob takes with it
    needs: tuple[Need, ...] = ()  # the statistics that the call reads
    reads_advantages: bool = False

    def __call__(self, state: State, facts: Facts) -> State:
        raise NotImplementedError


def _needs(unit: Unit, aggregate: Aggregate, name: str) -> tuple[Need, ...]:
    if unit == "token":
        return ()
    if aggregate == "mean":
        return Need("sum", unit, name), Need("sum", unit, "one")
    return (Need(aggregate, unit, name),)


def _expect(ok: bool, where: str, expected: str, got: object, why: str) -> None:
    if not ok:
        raise ConfigError(f"{where}: expected {expected}, got {got}: {why}")


@dataclass(frozen=True)
class Reweight(Step):
    """Sets the weights to the importance ratio at ``level``: exp(log-ratio of the unit).

    token: each token's own ratio; turn, sequence: the product over the unit; geometric: exp(mean over the
        sequence).
    Sequence weights are the unbiased ones, with a variance that grows exponentially with length.

    Source: token: Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; sequence: Liu and Li 2025,
    https://richardli.xyz/rl-collapse; turn: ST-PPO, https://arxiv.org/abs/2511.20718; geometric: GSPO,
    2507.18071.
    """

    level: Level = "token"

    @property
    def unit(self) -> Unit:
        return "sequence" if self.level == "geometric" else self.level

    @property
    def needs(self) -> tuple[Need, ...]:
        return _needs(self.unit, self._aggregate, "ratio")

    @property
    def _aggregate(self) -> Aggregate:
        return "mean" if self.level == "geometric" else "sum"

    def __call__(self, state: State, facts: Facts) -> State:
        ratio = facts.total(self.unit, self._aggregate, "ratio").exp().to(facts.log_ratio.dtype)
        return replace(state, weights=facts.spread(self.unit, ratio))


@dataclass(frozen=True)
class Truncate(Step):
    """Caps the weights from above: w = min(w, high), exactly ``high`` where it acts.

    Biases the gradient towards the behavior policy; in return no weight is larger than the cap.

    Source: Espeholt et al. 2018, IMPALA, https://arxiv.org/abs/1802.01561 (the clipped rho of V-trace).
    """

    high: float = 2.0

    def __post_init__(self) -> None:
        _expect(
            self.high >= 1,
            "truncate.high",
            "a number >= 1",
            self.high,
            "below 1 it would shrink on-policy tokens",
        )

    def __call__(self, state: State, facts: Facts) -> State:
        return _bounded(state, state.weights.clamp(max=self.high))


@dataclass(frozen=True)
class Clip(Step):
    """Bounds the weights on both sides: w = min(max(w, low), high). ``low`` 0 means none.

    Source: MiniMax-M1, https://arxiv.org/abs/2506.13585 (CISPO's weight).
    """

    low: float = 0.5
    high: float = 2.0

    def __post_init__(self) -> None:
        _expect(
            0 <= self.low <= 1,
            "clip.low",
            "a number in [0, 1]",
            self.low,
            "above 1 it would raise on-policy tokens",
        )
        _expect(
            self.high >= 1,
            "clip.high",
            "a number >= 1",
            self.high,
            "below 1 it would shrink on-policy tokens",
        )

    def __call__(self, state: State, facts: Facts) -> State:
        return _bounded(state, state.weights.clamp(self.low, self.high))


@dataclass(frozen=True)
class Reject(Step):
    """Drops the units whose statistic leaves [low, high] (both ends are inside; None means unbounded).

    ``ratio`` is aggregated before the exponential: sum is the product over the unit, mean the geometric mean,
    max the largest ratio. At unit token nothing is aggregated. ``when`` limits the rejection:
    ``negative_advantage`` to units whose mean advantage is negative, ``outward`` to those whose mean
    advantage and log-ratio have the same sign, so that the update would push the ratio further out.

    Source: token ratio: IcePop, https://arxiv.org/abs/2510.18855; sequence and geometric: Liu and Li 2025,
    https://richardli.xyz/rl-collapse; divergences: TRM, https://arxiv.org/abs/2512.23075.
    """

    unit: Unit = "token"
    statistic: Statistic = "ratio"
    aggregate: Aggregate = "mean"
    low: float | None = None
    high: float | None = None
    when: When = "always"

    def __post_init__(self) -> None:
        neutral = 1 if self.statistic == "ratio" else 0
        bounds = (self.low, self.high)
        _expect(
            bounds != (None, None),
            "reject",
            "low or high or both",
            "neither",
            "without a bound nothing is rejected",
        )
        low, high = self._interval
        _expect(
            low <= neutral <= high,
            "reject",
            f"low <= {neutral} <= high",
            list(bounds),
            "on-policy data must be kept",
        )

    @property
    def _interval(self) -> tuple[float, float]:
        low = -math.inf if self.low is None else self.low
        return low, math.inf if self.high is None else self.high

    @property
    def reads_advantages(self) -> bool:
        return self.when != "always"

    @property
    def needs(self) -> tuple[Need, ...]:
        own = _needs(self.unit, self.aggregate, self.statistic)
        return own + _needs_of_when(self.when, self.unit)

    def __call__(self, state: State, facts: Facts) -> State:
        low, high = self._interval
        if self.statistic == "ratio":
            low, high = _log(low), _log(high)
        value = facts.total(self.unit, self.aggregate, self.statistic)
        inside = (value >= low) & (value <= high)
        if self.when != "always":
            inside = inside | ~_applies(self.when, self.unit, facts)
        return replace(state, keep=state.keep & facts.spread(self.unit, inside))


@dataclass(frozen=True)
class Veto(Step):
    """Drops a whole sequence because of one response token whose ratio is below ``low`` or above ``high``.

    Source: verl PR 3984 (rollout_token_veto_threshold); SkyRL PR 849 (outlier_token_is_threshold).
    """

    low: float | None = None
    high: float | None = None

    unit = "sequence"

    def __post_init__(self) -> None:
        bounds = [self.low, self.high]
        _expect(
            bounds != [None, None],
            "veto",
            "low or high or both",
            "neither",
            "without a bound nothing is vetoed",
        )
        _expect(
            self.low is None or 0 <= self.low <= 1,
            "veto.low",
            "a number in [0, 1]",
            self.low,
            "on-policy data must be kept",
        )
        _expect(
            self.high is None or self.high >= 1,
            "veto.high",
            "a number >= 1",
            self.high,
            "on-policy data must be kept",
        )

    @property
    def needs(self) -> tuple[Need, ...]:
        low = () if self.low is None else (Need("min", "sequence", "ratio"),)
        return low if self.high is None else (*low, Need("max", "sequence", "ratio"))

    def __call__(self, state: State, facts: Facts) -> State:
        keep = state.keep
        if self.low is not None:
            keep = keep & facts.spread(
                "sequence", facts.table[Need("min", "sequence", "ratio")] >= _log(self.low)
            )
        if self.high is not None:
            keep = keep & facts.spread(
                "sequence", facts.table[Need("max", "sequence", "ratio")] <= _log(self.high)
            )
        return replace(state, keep=keep)


STEPS: dict[str, Callable[..., Step]] = {
    "reweight": Reweight,
    "truncate": Truncate,
    "clip": Clip,
    "reject": Reject,
    "veto": Veto,
}


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


def _bounded(state: State, weights: Tensor) -> State:
    if state.clipped is None:
        return replace(state, weights=weights)
    return replace(state, weights=weights, clipped=state.clipped | (weights != state.weights))


def _needs_of_when(when: When, unit: Unit) -> tuple[Need, ...]:
    if when == "always":
        return ()
    sign = _needs(unit, "sum", "advantage")
    return sign if when == "negative_advantage" else sign + _needs(unit, "sum", "ratio")


def _applies(when: When, unit: Unit, facts: Facts) -> Tensor:
    total = partial(facts.total, unit, "sum")
    if when == "negative_advantage":
        return total("advantage") < 0
    return total("advantage") * total("ratio") > 0
