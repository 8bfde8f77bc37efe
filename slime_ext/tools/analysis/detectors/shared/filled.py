"""Counts log-probs of exactly 0 at tokens of which the trainer is unsure, and sums over the tokens beside."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

import torch
from torch import Tensor

from slime_ext.ops.divergences import is_log_prob
from slime_ext.ops.segments import as_bytes
from slime_ext.tools.analysis.detectors.shared.clipped import COLUMNS, clipped
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure, once_per_part
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import any_true, count_true, zeros

REACH = 3  # tokens on each side of one with a log-prob of exactly 0
UNLIKELY = -2.0  # nats; top-p above 0.14 never keeps such a token alone
NEARLY_ALL = 0.95  # share of tokens with a log-prob of 0, or outside the mask with another one
FEWEST_TOLD = 50  # tokens with a log-prob of 0, and outside the mask with another one
DOUBTED = -0.25  # nats; if one side is sure, rounding to bfloat16 alone leaves the other above this


class Filled(Measure):
    """Tokens whose log-prob of the sampler is 0 where the trainer's is below DOUBTED, or below UNLIKELY.

    ``zeros`` is the number and sum of k3 of all tokens whose log-prob of the sampler is 0, [2].
    """

    version: ClassVar[int] = 2

    doubted: int = 0
    unlikely: int = 0
    zeros: Tensor = field(default_factory=lambda: zeros(2))

    def add(self, part: DumpedRollout) -> None:
        zero = part.finite & part.is_zero
        if not any_true(zero):
            return
        self.doubted += count_true(zero & (part.proximal < DOUBTED))
        self.unlikely += count_true(zero & (part.proximal < UNLIKELY))
        count, *_, near = part.columns
        self.zeros += torch.stack([count[zero], near[zero]]).sum(1)


class Outside(Measure):
    """Numbers of response tokens outside the mask, and of those with a log-prob of the sampler below 0."""

    takes_joined: ClassVar[bool] = True

    tokens: int = 0
    recorded: int = 0

    def add(self, part: DumpedRollout) -> None:
        outside = ~part.mask
        if any_true(outside):
            self.tokens += count_true(outside)
            self.recorded += count_true(outside & is_log_prob(part.behavior) & ~part.is_zero)


class Sure(Measure):
    """Number of tokens with both log-probs whose log-prob of the sampler is exactly 0."""

    takes_joined: ClassVar[bool] = True

    tokens: int = 0

    def add(self, part: DumpedRollout) -> None:
        self.tokens += count_true(part.finite & part.is_zero)


def is_inverted(d: Diagnosis) -> bool:
    """Returns whether the mask has the tokens that were told, and leaves out those that were sampled.

    If the sampler's log-probs were missing, or 0 because it takes the likeliest token, they would be so
    outside the mask as well.
    """
    inside, outside = d.of(Sure).tokens, d.of(Outside)
    are_told = inside >= max(FEWEST_TOLD, NEARLY_ALL * d.sums.finite)
    return are_told and outside.recorded >= max(FEWEST_TOLD, NEARLY_ALL * outside.tokens)


@once_per_part
def filled(part: DumpedRollout) -> Tensor:
    """Returns the response tokens with a log-prob of 0 that the trainer finds unlikely, [T] bool."""
    zero = part.mask & part.is_zero
    return zero & (part.proximal < UNLIKELY) if any_true(zero) else zero


class Beside(Measure):
    """Sums of ``clipped`` over tokens away from filled zeros, beside one, and of log-prob 0.

    The table is [3, COLUMNS].
    """

    takes_joined: ClassVar[bool] = True
    version: ClassVar[int] = 2

    sums: Tensor = field(default_factory=lambda: zeros(3, COLUMNS))

    def add(self, part: DumpedRollout) -> None:
        part.tabulate(self.sums, _beside(part), clipped(part))


def _beside(part: DumpedRollout) -> Tensor:
    """Returns the row of ``Beside`` of each token, [T]; 2 if its log-prob is exactly 0."""
    forced = filled(part)
    near, ids = forced.clone(), part.segments.ids
    for step in range(1, REACH + 1) if any_true(forced) else ():
        same = ids[step:] == ids[:-step]
        near[step:] |= forced[:-step] & same
        near[:-step] |= forced[step:] & same
    zero = part.mask & part.is_zero
    return as_bytes(near & ~zero) + 2 * as_bytes(zero)
