"""Summarises each rollout: its size, its distance between the policies, its rewards and lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from slime_ext.tools.analysis.measures.histogram import Histogram
from slime_ext.tools.analysis.measures.sums import Sums
from slime_ext.tools.analysis.records import SURPRISES, DumpedRollout
from slime_ext.tools.analysis.tables import count_true, mean_of, tabulated, zeros

TOP = 0.01  # share of the tokens, with the largest |l|, whose share of sum l^2 is kept


class RolloutSummary(NamedTuple):
    """Size and mismatch of one rollout."""

    rollout_id: int
    tokens: int
    absolute: float  # mean |l|
    k3: float
    top_share: float  # of sum l^2, in the 1% of tokens with the largest |l|
    median: float  # of |l|
    version: int = -1  # newest version that sampled, -1 if unknown
    length: float = 0.0  # mean response length
    pushed: float | None = None  # mean |log behavior - log first policy|, None if unknown
    moved: float | None = None  # mean |log proximal - log first policy|
    reward: float | None = None  # mean over sequences
    reward_error: float = 0.0  # standard error of ``reward``
    surprise: float = 0.0  # mean -log behavior
    certainty: Sequence[Sequence[float]] = ()  # number and sum |l| of the tokens, by bin of -log behavior
    k3_error: float = 0.0  # standard error of log(mean k3), from samples drawn again
    absolute_error: float = 0.0  # standard error of log(mean |l|)


@dataclass
class RolloutSums:
    """Sums over the tokens and samples of one rollout that only its summary reads."""

    near: float = 0.0  # k3, but at most MOST_K3 per token
    referenced: int = 0  # tokens with the first policy's log-prob
    pushed: float = 0.0  # |log behavior - log first policy| at these tokens
    moved: float = 0.0  # |log proximal - log first policy|
    reward_squared: float = 0.0
    certainty: Tensor = field(default_factory=lambda: zeros(SURPRISES, 2))

    def add(self, part: DumpedRollout) -> None:
        """Adds the tokens and samples of a part of the rollout."""
        count, absolute, *_, near = part.columns
        self.near += float(near.sum())
        self.certainty += tabulated(part.surprise, (count, absolute), SURPRISES)
        if part.rewards is not None:
            rewards = part.rewards[part.rewards.isfinite()].double()
            self.reward_squared += float(rewards.square().sum())
        if part.reference is not None:
            is_known = part.finite & part.reference.isfinite()
            pushed, moved = (
                torch.where(is_known, (side - part.reference).abs().double(), 0)
                for side in (part.behavior, part.proximal)
            )
            self.referenced += count_true(is_known)
            self.pushed += float(pushed.sum())
            self.moved += float(moved.sum())


def summary_of(
    rollout_id: int,
    sums: Sums,
    others: RolloutSums,
    versions: Mapping[int, Tensor],
    errors: tuple[float, float],
) -> RolloutSummary:
    """Returns the summary of a rollout that has a token with both log-probs.

    Args:
        sums, others, versions: of this rollout alone.
        errors: standard errors of the logarithms of mean k3 and mean |l|.
    """
    # By versions if they are known, because these undo a shift of log-probs.
    count, _, _, near, *_ = sum(versions.values(), zeros(7)).tolist()
    return RolloutSummary(
        rollout_id,
        sums.finite,
        sums.mean_absolute or 0.0,
        near / count if count else others.near / sums.finite,
        *_tail(sums.histogram),
        version=max(versions, default=-1),
        length=mean_of(sums.length, sums.sequences) or 0.0,
        pushed=mean_of(others.pushed, others.referenced),
        moved=mean_of(others.moved, others.referenced),
        reward=mean_of(sums.reward, sums.rewarded),
        reward_error=_error(sums.rewarded, sums.reward, others.reward_squared),
        surprise=-(sums.mean_behavior or 0.0),
        certainty=others.certainty.tolist(),
        k3_error=errors[0],
        absolute_error=errors[1],
    )


def top_share(rollouts: Sequence[RolloutSummary]) -> float:
    """Returns the share of sum l^2 in the 1% of tokens with the largest |l|, the median over rollouts."""
    return median(rollout.top_share for rollout in rollouts) if rollouts else 0.0


def mean_k3(rollouts: Sequence[RolloutSummary]) -> float:
    """Returns k3 of some rollouts, the mean over their response tokens."""
    tokens = sum(rollout.tokens for rollout in rollouts)
    return sum(rollout.k3 * rollout.tokens for rollout in rollouts) / tokens if tokens else 0.0


def equally_certain(rollouts: Sequence[RolloutSummary]) -> list[float]:
    """Returns mean |l| of each rollout as it would be with the run's mix of certain and uncertain tokens.

    So prompts with certain answers do not make a rollout look better.
    """
    if not rollouts:
        return []
    count, absolute = torch.tensor([s.certainty for s in rollouts], dtype=torch.float64).unbind(2)
    usual = absolute.sum(0) / count.sum(0).clamp_min(1)
    mean = absolute.sum() / count.sum().clamp_min(1)
    return (mean * absolute.sum(1) / (count @ usual).clamp_min(1e-30)).tolist()


def _error(count: float, total: float, square: float) -> float:
    if not count:
        return 0.0
    mean = total / count
    return math.sqrt(max(square / count - mean * mean, 0.0) / count)  # ** would raise on overflow


def _tail(histogram: Histogram) -> tuple[float, float]:
    """Returns the share of sum l^2 in the top 1% of tokens, and the median |l|."""
    counts, sizes = (x.numpy() for x in histogram.sizes())
    rows = counts, counts * (sizes * sizes)
    reached, squares = (numpy.concatenate([[0], row[::-1].cumsum()]) for row in rows)
    top = numpy.interp(TOP * reached[-1], reached, squares)  # all tokens of a bucket count alike
    middle = float(sizes[counts.cumsum().searchsorted(reached[-1] / 2)])
    return (float(top / squares[-1]) if squares[-1] else 0.0), middle
