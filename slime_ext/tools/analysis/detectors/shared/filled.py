"""Counts log-probs of exactly 0 at tokens of which the trainer is unsure, and sums over the tokens beside."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

import torch
from torch import Tensor

from slime_ext.ops.segments import as_bytes
from slime_ext.tools.analysis.detectors.shared.clipped import COLUMNS, clipped
from slime_ext.tools.analysis.measures.measure import Measure, once_per_part
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import any_true, count_true, zeros

REACH = 3  # tokens on each side of one with a log-prob of exactly 0
UNLIKELY = -2.0  # nats; top-p above 0.14 never keeps such a token alone
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
