"""What the samples of one rollout or one prompt mean for each other: plain arithmetic on a table of samples.

A rollout is what the host counts once in its loss (slime may split it into several samples); a group is the
samples of one prompt. A sample is rejected when it has response tokens and none of them is kept.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

EPSILON = 1e-6  # what slime adds to a group's standard deviation


class SampleRow(NamedTuple):
    """One sample of the rollout, on whatever rank it is trained.

    Attributes:
        rollout, group: keys, equal for samples that share them.
        step: the optimizer step that trains it, -1: none.
        tokens: response tokens by the host's mask.
        kept: those that the correction keeps.
        denominator: what the host divides the sample's loss by.
        reward: as the host's advantages have it; NaN for one that the host's baseline leaves out.
    """

    rollout: float
    group: float
    step: float
    tokens: float
    kept: float
    denominator: float
    reward: float

    @property
    def is_rejected(self) -> bool:
        return self.tokens > 0 and self.kept == 0


def broken_groups(rows: Sequence[SampleRow]) -> set[float]:
    """The groups with a rejected sample."""
    return {row.group for row in rows if row.is_rejected}


def without(rows: Sequence[SampleRow], groups: set[float]) -> list[SampleRow]:
    """The table with nothing kept of these groups."""
    return [row._replace(kept=0.0) if row.group in groups else row for row in rows]


def rollout_factors(rows: Sequence[SampleRow]) -> list[float]:
    """D / K per sample: D what the host divides a rollout by, K the tokens kept of all its samples.

    A rollout of which nothing is kept has factor 1: it contributes 0, and the host still counts it.
    """
    kept: dict[tuple[float, float], float] = defaultdict(float)
    for row in rows:
        kept[row.step, row.rollout] += row.kept
    return [
        max(row.denominator, 1.0) / (kept[row.step, row.rollout] or max(row.denominator, 1.0)) for row in rows
    ]


def token_factors(rows: Sequence[SampleRow]) -> list[float]:
    """N / K per sample: N the tokens that the host divides an optimizer step by, K those that are kept.

    The host counts a sample without response tokens as one token.
    """
    counted: dict[float, float] = defaultdict(float)
    kept: dict[float, float] = defaultdict(float)
    for row in rows:
        counted[row.step] += max(row.tokens, 1.0)
        kept[row.step] += row.kept
    return [counted[row.step] / (kept[row.step] or counted[row.step]) for row in rows]


def rebaselined(rows: Sequence[SampleRow], *, by_std: bool) -> list[float | None]:
    """GRPO advantages of groups with a rejected sample, computed without it; None where nothing changes.

    A_i = (r_i - mean) / (std + 1e-6) over the samples that are left, unbiased std; 0 for the rejected ones
    and for one that is left alone. The host's rewards are centred and scaled already, which this undoes but
    for the 1e-6.

    Source: Shao et al. 2024, https://arxiv.org/abs/2402.03300; the fault: verl issue 6452.
    """
    groups: dict[float, list[float]] = defaultdict(list)
    for row in rows:
        if not row.is_rejected and not math.isnan(row.reward):
            groups[row.group].append(row.reward)
    broken = broken_groups(rows)
    return [_advantage(row, groups[row.group], by_std) if row.group in broken else None for row in rows]


def _advantage(row: SampleRow, rewards: Sequence[float], by_std: bool) -> float:
    if row.is_rejected or math.isnan(row.reward) or len(rewards) < 2:
        return 0.0
    centred = row.reward - statistics.fmean(rewards)
    return centred / (statistics.stdev(rewards) + EPSILON) if by_std else centred
