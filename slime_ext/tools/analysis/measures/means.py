"""Computes means over tokens with errors that allow for dependent tokens of the same sequence."""

from __future__ import annotations

import math
from dataclasses import field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from slime_ext.ops.segments import as_numbers
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import Additive, zeros

LARGEST_RATIO = 10.0  # larger ratios count as this, so that no single token determines a mean


class Mean(NamedTuple):
    """A mean over tokens with its standard error; only tokens of the same sequence may be dependent."""

    value: float
    error: float
    count: int

    @property
    def z(self) -> float:
        """The number of standard errors between the mean and 0."""
        return (
            self.value / self.error if self.error else math.copysign(math.inf, self.value) * bool(self.value)
        )


class Means(Additive):
    """The sums from which ``Mean`` follows.

    For each of the four properties these are sum a, sum a^2, sum a n, sum n and sum n^2 over sequences, where
    a is the sum of the property over a sequence of n tokens.
    """

    takes_joined: ClassVar[bool] = True

    sums: Tensor = field(default_factory=lambda: zeros(4, 5))

    def add(self, part: DumpedRollout) -> None:
        """Adds the sequences of a part of a rollout."""
        n, absolute, _, log_ratio, *_ = part.sample_sums
        ratio_minus_one = torch.expm1(part.log_ratio.clamp(max=math.log(LARGEST_RATIO)))
        totals = (part.sums([ratio_minus_one])[0], log_ratio, absolute)
        quantities = [(total, n) for total in totals]
        if part.entropy is not None:
            known = part.finite & part.entropy.isfinite()
            surprise = torch.where(known, -part.behavior - part.entropy, 0)
            quantities.append(tuple(part.sums([surprise, as_numbers(known, torch.float64)])))
        rows = [torch.stack([a, a.square(), a * n, n, n.square()]) for a, n in quantities]
        for of_rollout in torch.stack(rows).split([one.count for one in part.rollouts], 2):
            self.sums[: len(rows)] += of_rollout.sum(2)

    @property
    def ratio_minus_one(self) -> Mean:
        """The mean of e^l - 1, where a ratio above ``LARGEST_RATIO`` counts as that."""
        return self._mean(0)

    @property
    def log_ratio(self) -> Mean:
        """The mean of l."""
        return self._mean(1)

    @property
    def absolute(self) -> Mean:
        """The mean of |l|."""
        return self._mean(2)

    @property
    def surprise(self) -> Mean:
        """The mean of -log behavior minus the trainer's entropy, over tokens whose entropy is known."""
        return self._mean(3)

    def _mean(self, row: int) -> Mean:
        total, square, cross, n, n_square = self.sums[row].tolist()
        if not n:
            return Mean(0.0, 0.0, 0)
        mean = total / n
        return Mean(mean, math.sqrt(max(square - 2 * mean * cross + mean * mean * n_square, 0)) / n, int(n))
