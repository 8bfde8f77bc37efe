"""Steps that couple samples: each settles one number over the whole optimizer step, before any micro-batch is
trained.

``settle`` sees every micro-batch of this rank and an ``all_sum`` over all ranks, so the number does not
depend on how tokens are packed or split. ``slime_ext.correction.plan_step`` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from slime_ext.facts import Facts, State, Step, expect
from slime_ext.ops.segments import AllSum
from slime_ext.ops.statistics import Need

Seen = Sequence[tuple[State, Facts]]
TOP = 0x7FEFFFFFFFFFFFFF  # the bits of the largest finite float64; order of bits is order of values from 0 up


@dataclass(frozen=True)
class Normalize(Step):
    """Divides the weights by their mean, so that the mean weight of the optimizer step is 1.

    ``level`` says what the mean counts alike: tokens, or sequences (each token by 1 / response tokens of its
    sequence). Rejected tokens count, tokens with a non-finite behavior log-prob do not. Biased, of low
    variance.

    Source: Owen 2013, Monte Carlo theory, section 9.2; verl PR 3980 (rollout_is_batch_normalize).
    """

    level: Literal["token", "sequence"] = "token"

    is_coupled = True

    @property
    def needs(self) -> tuple[Need, ...]:
        return () if self.level == "token" else (Need("sum", "sequence", "count"),)

    def settle(self, seen: Seen, all_sum: AllSum) -> Tensor:
        """[] float64: the mean weight of the step; 1 where there is no weight at all."""
        total, count = all_sum(sum(self._share(state, facts) for state, facts in seen)).unbind()
        return torch.where(total > 0, total / count, 1)

    def __call__(self, state: State, facts: Facts) -> State:
        # In float64: the mean may be smaller than any float32 while the largest weight over it is not.
        weights = state.weights.double() / facts.plan[self]
        return replace(state, weights=weights.to(state.weights.dtype))

    def _share(self, state: State, facts: Facts) -> Tensor:
        per_token = facts.usable.double()
        if self.level == "sequence":
            count = facts.table[Need("sum", "sequence", "count")].clamp_min(1)
            per_token = per_token / facts.spread("sequence", count)
        weighted = torch.where(facts.usable, facts.spread(state.unit, state.weights), 0).double() * per_token
        return torch.stack([weighted.sum(), per_token.sum()])


@dataclass(frozen=True)
class SecondMoment(Step):
    """Drops the tokens with the largest squared log-ratio of the step until the mean of the rest is <
    ``threshold``.

    Tokens with equal values stay or go together, and the smallest always stay. This is the all-sign variant;
    the paper restricts it to the tokens that PPO would clip.

    Source: M2PO, https://arxiv.org/abs/2510.01161; AReaL (m2_threshold).
    """

    threshold: float = 0.04

    is_coupled = True
    rejects = True

    def __post_init__(self) -> None:
        expect(
            self.threshold > 0,
            "second_moment.threshold",
            "a number > 0",
            self.threshold,
            "nothing would be kept",
        )

    def settle(self, seen: Seen, all_sum: AllSum) -> Tensor:
        """[] float64: the largest squared log-ratio that stays.

        Searches the bits of the cut byte by byte, with one SUM of 256 counts and sums per byte: exact, and no
        rank has to see another's tokens.
        """
        ranked = [_ranked(facts) for _, facts in seen]

        def below(cuts: Tensor) -> Tensor:
            """[cuts, 2] count and sum of the squared log-ratios up to each cut, over all ranks."""
            return all_sum(sum(_up_to(cuts, values, sums) for values, sums in ranked))

        def none(cuts: Tensor) -> Tensor:
            return below(cuts)[:, 0] == 0

        def small(cuts: Tensor) -> Tensor:
            count, total = below(cuts).unbind(1)
            return (count == 0) | (total < self.threshold * count)

        device = seen[0][1].log_ratio.device
        smallest = _last(none, device) + 1
        return torch.maximum(_last(small, device), smallest).view(torch.float64)

    def __call__(self, state: State, facts: Facts) -> State:
        return state.reject("token", facts.log_ratio.double().square() <= facts.plan[self])


def _ranked(facts: Facts) -> tuple[Tensor, Tensor]:
    """Squared log-ratios of usable tokens in ascending order, padded with inf, and their sums from the
    left."""
    values = torch.where(facts.usable, facts.log_ratio.double().square(), torch.inf).sort().values
    return values, torch.cat([values.new_zeros(1), values.cumsum(0)])


def _up_to(cuts: Tensor, values: Tensor, sums: Tensor) -> Tensor:
    count = torch.searchsorted(values, cuts, right=True)
    return torch.stack([count.double(), sums.index_select(0, count)], 1)


def _last(holds: Callable[[Tensor], Tensor], device: torch.device) -> Tensor:
    """[] int64, the bits of the largest finite value >= 0 for which ``holds`` (true, then false), or -1."""
    found = torch.zeros((), dtype=torch.int64, device=device)
    digits = torch.arange(256, device=device)
    for shift in range(56, -8, -8):
        bits = found + (digits[:128] if shift == 56 else digits) * 2**shift
        good = holds(bits.clamp(max=TOP).view(torch.float64)) & (bits <= TOP)
        last = good.sum() - 1
        found = bits.index_select(0, last.clamp_min(0).view(1)).squeeze(0)
    return torch.where(last < 0, -1, found)
