"""Steps as other systems spell them: statistics over the tokens that earlier steps kept, clamped log-ratios,
and bands that zero a weight without taking its token out of the masks.

The native steps read the host's response mask and clamp nothing, so that rejections commute. Only a dialect,
or a mapping that ``slime-ext convert`` printed, needs what is here.

A sum over tokens that were kept waits for what decided that, so it cannot share the correction's one
all-reduce: where a sequence's tokens lie on several ranks, ``over: kept`` or ``clamp`` with a statistic per
sequence costs one more.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from slime_ext.facts import Facts, State, Step, expect
from slime_ext.ops.statistics import Need, Unit, tabulate
from slime_ext.steps import Reject, Reweight

Over = Literal["response", "kept"]
CLAMPABLE = ("ratio", "k1", "k2", "k3")


@dataclass(frozen=True)
class KeptFacts(Facts):
    """Facts whose sums and counts leave out the tokens that are not ``kept``."""

    kept_tokens: Tensor | None = None  # [T] bool

    def value_of(self, name: str) -> Tensor:
        values = super().value_of(name)
        return values if self.kept_tokens is None else torch.where(self.kept_tokens, values, 0)


def narrowed(
    facts: Facts, state: State, over: Over, clamp: float | None, needs: tuple[Need, ...]
) -> KeptFacts:
    """Facts over other tokens or clamped log-ratios, with the statistics that ``needs`` names."""
    values = {f.name: getattr(facts, f.name) for f in dataclasses.fields(facts)}
    if clamp is not None:
        values["log_ratio"] = facts.log_ratio.clamp(-clamp, clamp)
    kept = facts.kept(state) if over == "kept" else None
    own = KeptFacts(**values, kept_tokens=kept)
    return replace(own, table={**facts.table, **tabulate(needs, own.value_of, facts.segments)})


@dataclass(frozen=True)
class ScopedReweight(Reweight):
    """``Reweight`` over the tokens that earlier steps kept, or of log-ratios clamped to [-clamp, clamp].

    Source: over: SkyRL PR 849; clamp: fw-ai cookbook PR 169 (+-20 per token before the mean).
    """

    over: Over = "response"
    clamp: float | None = None

    @property
    def needs(self) -> tuple[Need, ...]:
        return ()

    def __post_init__(self) -> None:
        _check("reweight", self.clamp)

    def __call__(self, state: State, facts: Facts) -> State:
        return super().__call__(state, narrowed(facts, state, self.over, self.clamp, super().needs))

    def plain(self) -> Step:
        """The native step, where it says the same."""
        return Reweight(self.level) if self.over == "response" and self.clamp is None else self


@dataclass(frozen=True)
class ScopedReject(Reject):
    """``Reject`` over the tokens that earlier steps kept, or of log-ratios clamped to [-clamp, clamp].

    Source: over: SkyRL PR 849; clamp: verl, compute_rollout_rejection_mask (+-20 per token).
    """

    over: Over = "response"
    clamp: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("reject", self.clamp)
        expect(
            self.clamp is None or self.statistic in CLAMPABLE,
            "reject.clamp",
            f"one of {', '.join(CLAMPABLE)} as the statistic",
            self.statistic,
            "it reads probabilities, not log-ratios",
        )
        expect(
            self.over == "response" or self.aggregate != "max" or self.low is None,
            "reject.over",
            "response beside aggregate max with a lower bound",
            self.over,
            "tokens that are left out would count as 0",
        )

    @property
    def needs(self) -> tuple[Need, ...]:
        return ()

    def __call__(self, state: State, facts: Facts) -> State:
        return super().__call__(state, narrowed(facts, state, self.over, self.clamp, super().needs))

    def plain(self) -> Step:
        """The native step, where it says the same."""
        if self.over == "kept" or self.clamp is not None:
            return self
        return Reject(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Reject)})


@dataclass(frozen=True)
class ZeroOutside(Step):
    """Sets the weight to 0 where the unit's ratio leaves [low, high]; the token stays in the masks.

    IcePop as verl and the fw-ai cookbook have it; ``reject`` is the one that also takes the token out.

    Source: verl PR 5722; fw-ai cookbook, TISConfig.icepop_threshold; https://arxiv.org/abs/2510.18855.
    """

    unit: Unit = "token"
    aggregate: Literal["sum", "mean"] = "sum"
    low: float = 0.5
    high: float = 2.0

    is_bound = True

    def __post_init__(self) -> None:
        expect(
            0 <= self.low <= 1 <= self.high,
            "zero_outside",
            "0 <= low <= 1 <= high",
            [self.low, self.high],
            "on-policy data must keep its weight",
        )

    @property
    def needs(self) -> tuple[Need, ...]:
        return self._band.needs

    def __call__(self, state: State, facts: Facts) -> State:
        fresh = replace(state, keep=torch.ones_like(state.keep), units={})
        inside = facts.kept(self._band(fresh, facts))
        weights = facts.spread(state.unit, state.weights)
        before = () if state.clipped is None else ((i, facts.spread(state.unit, c)) for i, c in state.clipped)
        clipped = None if state.clipped is None else tuple(before)
        spread = replace(state, weights=weights, clipped=clipped, unit="token")
        return spread.bound(torch.where(inside, weights, 0))

    @property
    def _band(self) -> Reject:
        return Reject(self.unit, "ratio", self.aggregate, self.low, self.high)


FORMS: dict[str, Any] = {"reweight": ScopedReweight, "reject": ScopedReject, "zero_outside": ZeroOutside}


def _check(name: str, clamp: float | None) -> None:
    ok = clamp is None or clamp > 0
    expect(ok, f"{name}.clamp", "a number > 0", clamp, "it bounds the log-ratio on both sides")
