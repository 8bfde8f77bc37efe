"""Tests whether the tokens were drawn from the recorded policy, by what holds for any two policies.

If tokens are drawn from q and q is recorded, the mean of the ratio p / q is 1 for any p, because the sum of
q(x) p(x) / q(x) over the vocabulary is 1. This holds in each rollout and at each place of the response. Old
weights, other weights, lower precision, noise and other routing leave it at 1; log-probs of other tokens, or
from before a temperature, do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.means import LARGEST_RATIO, Mean
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import tabulated, zeros

PLACES = 18  # octaves of the position in the response
FEWEST, SAMPLES = 200, 16  # tokens; samples that reach a place or are in a rollout
SURE, MATTERS = 6.0, 0.02  # standard errors above 1; least excess of the mean ratio


class RatioSums(NamedTuple):
    """Sums over the samples of a rollout: a, a^2, a n, n, n^2, and their number.

    a is the sum of the ratio minus 1 over the n tokens of a sample.
    """

    rollout_id: int
    sums: tuple[float, ...]


@dataclass
class Ratios(Measure):
    """The sums of ``RatioSums`` by place in the response, [PLACES, 6], and by rollout.

    ``rollout`` is of the rollout that is being read. A ratio above LARGEST_RATIO counts as that, which only
    lowers the mean.
    """

    places: Tensor = field(default_factory=lambda: zeros(PLACES, 6))
    rollouts: list[RatioSums] = field(default_factory=list)
    rollout: Tensor = field(default_factory=lambda: zeros(6))

    def add(self, part: DumpedRollout) -> None:
        if not part.size:
            return
        ratio = torch.expm1(part.log_ratio.double().clamp(max=math.log(LARGEST_RATIO)))
        octave = (1.0 + part.segments.within).log2().long().clamp(max=PLACES - 1)
        index = part.segments.ids.long() * PLACES + octave
        table = tabulated(index, [ratio, part.columns[0]], part.count * PLACES).view(part.count, PLACES, 2)
        self.places += _sums(table)
        self.rollout += _sums(table.sum(1, keepdim=True))[0]

    def close(self, rollout: DumpedRollout) -> None:
        self.rollouts.append(RatioSums(rollout.rollout_id, tuple(self.rollout.tolist())))
        self.rollout = zeros(6)


def _sums(table: Tensor) -> Tensor:
    """Returns the sums over samples from a and n of each sample and place, [S, P, 2] -> [P, 6]."""
    a, n = table.unbind(2)
    return torch.stack([a, a * a, a * n, n, n * n, (n > 0).double()]).sum(1).T


def mean_ratios(d: Diagnosis) -> Iterator[Mean]:
    """Yields the mean of the ratio minus 1 in each rollout and at each place with enough samples."""
    ratios = d.of(Ratios)
    for a, square, cross, n, n_square, samples in (
        *ratios.places.tolist(),
        *(r.sums for r in ratios.rollouts),
    ):
        if n >= FEWEST and samples >= SAMPLES:
            mean = a / n
            error = math.sqrt(max(square - 2 * mean * cross + mean * mean * n_square, 0.0)) / n
            yield Mean(mean, error, int(n))


def is_above_one(d: Diagnosis) -> bool:
    """Returns whether the mean ratio is above 1 over the run, in a rollout or at a place.

    No trainer does that to tokens that were drawn from the recorded policy, so another cause is excluded that
    leaves the record true.
    """
    means = (d.means.ratio_minus_one, *mean_ratios(d))
    return any(mean.z >= SURE and mean.value >= MATTERS for mean in means)
