"""Tells whether every sample mixes tokens that agree with tokens that are far off."""

from __future__ import annotations

import math
from dataclasses import field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from slime_ext.ops.segments import as_bytes
from slime_ext.tools.analysis.detectors.shared.along import Positions
from slime_ext.tools.analysis.detectors.shared.clipped import COLUMNS, clipped
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import is_below, zeros

# Upper ends of the octaves of |l|, nats. The smallest is below what float32 resolves in a log-prob of -1000.
LOWEST = -13
ENDS = tuple(2.0**k for k in range(LOWEST, 5))
OCTAVES = len(ENDS) + 1
UNSURE = -0.5  # nats, log-prob of the sampler; tokens above agree whatever the policy
FEWEST = 300  # tokens
SURE = 4.0  # standard errors by which the smaller of two peaks exceeds the valley between them
DEEP = 0.8  # largest count in the valley over that of the smaller peak; one peak has no valley
LEAST = 0.1  # share of the tokens on either side of the valley
# Least mean |l| of the tokens that do not agree, nats. bfloat16 rounds logits from 16 to 32 to 1/8, so the
# rounding of both sides leaves many tokens equal and moves the others by up to twice that.
FAR = 0.25
# Largest variance of the share of a sample over that of independent tokens, which is 1. Where whole samples,
# stretches or engines differ it is above 3.6 (all mixtures of benchmarks/faults).
BY_CHANCE = 2.0
NEAR, AT_A_PLACE = 1 / 3, 100  # mean |l| at a place over that of equally certain tokens; tokens there


class Octaves(Measure):
    """Sums by octave of |l|.

    Attributes:
        unsure: [OCTAVES, 3] over tokens of which the sampler was unsure: their number in the octave; then
            the sums of c^2 and n c over samples, which have n such tokens, c of them up to the octave.
        every: [OCTAVES, COLUMNS] of ``clipped`` over all tokens.
    """

    takes_joined: ClassVar[bool] = True

    unsure: Tensor = field(default_factory=lambda: zeros(OCTAVES, 3))
    every: Tensor = field(default_factory=lambda: zeros(OCTAVES, COLUMNS))

    def add(self, part: DumpedRollout) -> None:
        if not part.size:
            return
        octave = octave_of(part.log_ratio)
        part.tabulate(self.every, octave, clipped(part))
        is_sure = as_bytes(~(part.finite & is_below(part.behavior, UNSURE)))
        place = (part.segments.ids * 2 + is_sure) * OCTAVES + octave
        table = torch.bincount(place, minlength=2 * part.count * OCTAVES)
        table = table.view(part.count, 2, OCTAVES)[:, 0].double()
        until = table.cumsum(1)
        self.unsure += torch.stack(
            [table.sum(0), until.square().sum(0), (until[:, -1:] * until).sum(0)], 1
        )  # whole numbers, so the order does not matter


def octave_of(log_ratio: Tensor) -> Tensor:
    """Returns the number of ENDS that |l| reaches, [T] float32 -> [T] int32.

    It is read from the exponent, in a fraction of the time of a search.

    >>> octave_of(torch.tensor([0.0, 2.0**-14, -(2.0**-13), 0.3, 0.5, -1e6])).tolist()
    [0, 0, 1, 12, 13, 18]
    """
    exponent = ((log_ratio.float().view(torch.int32) >> 23) & 0xFF) - 127
    return (exponent - LOWEST + 1).clamp(0, OCTAVES - 1)


class Mixed(NamedTuple):
    """Tokens of two kinds in every sample.

    Attributes:
        end: |l| below which a token agrees, nats.
        agree: share of the unsure tokens that agree.
        spread: variance of a sample's share over that of independent tokens.
        far: [COLUMNS] of ``clipped`` over the tokens that do not agree.
    """

    end: float
    agree: float
    spread: float
    far: Tensor


def mixed(d: Diagnosis) -> Mixed | None:
    """Returns the two kinds of tokens if |l| has two peaks and all samples have both kinds alike, else None.

    The logarithm of |l| has one peak for one cause, so two peaks are two causes. If a part of the run, the
    samples of an engine or a stretch of a response had the second one, the share would change from sample to
    sample, or from place to place.
    """
    octaves = d.of(Octaves)
    count, squares, crossed = octaves.unsure.unbind(1)
    n = float(count.sum())
    if n < FEWEST:
        return None
    until, height = count.cumsum(0), count.tolist()
    best, valley = 0.0, 0
    for k in range(1, OCTAVES - 1):
        peak = min(max(height[:k]), max(height[k + 1 :]))
        depth = (peak - height[k]) / math.sqrt(max(peak + height[k], 1.0))
        if height[k] <= DEEP * peak and depth > best and LEAST <= float(until[k]) / n <= 1 - LEAST:
            best, valley = depth, k
    if best < SURE:
        return None
    share = float(until[valley]) / n
    variance = float(squares[valley] - 2 * share * crossed[valley] + share**2 * crossed[-1])
    spread = variance / (share * (1 - share) * n)
    far = octaves.every[valley + 1 :].sum(0)
    if spread > BY_CHANCE or far[2] < FAR * far[0] or _has_a_near_place(d):
        return None
    return Mixed(ENDS[valley], share, spread, far)


def _has_a_near_place(d: Diagnosis) -> bool:
    """Returns whether tokens agree at some place of the responses, as within an attention window."""
    table = d.of(Positions).table  # [places, SURPRISES, 4]
    count = table[:, :, 0]
    usual = table[:, :, 1:3].sum(0) / count.sum(0).clamp_min(1)[:, None]  # mean |l| and l^2 by certainty
    expected, square = (count @ usual).unbind(1)
    absolute = table[:, :, 1].sum(1)
    is_near = (absolute <= NEAR * expected) & (expected - absolute >= SURE * square.sqrt())
    return bool((is_near & (count.sum(1) >= AT_A_PLACE)).any())
