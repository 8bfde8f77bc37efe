"""Measures how l depends on how often a token came before, among equally certain tokens."""

from __future__ import annotations

import math
from dataclasses import field
from typing import ClassVar

import torch
from torch import Tensor

from slime_ext.ops.segments import as_bytes
from slime_ext.tools.analysis.detectors.shared.clipped import COLUMNS, clipped
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure, once_per_part
from slime_ext.tools.analysis.records import SURPRISES, DumpedRollout
from slime_ext.tools.analysis.tables import are_equal, earlier, tabulated_apart, zeros

SEEN = 4  # how often a token came before in its response: 0, 1, 2, more


@once_per_part
def came_before(part: DumpedRollout) -> Tensor:
    """Returns how often each token came before in its response, [T]."""
    return earlier((part.segments.ids.long() << 32) + part.tokens)


@once_per_part
def by_repetition(part: DumpedRollout) -> Tensor:
    """Returns the sums of ``clipped`` by how the token came before, and by bin of -log behavior.

    The table is [R, 5, SURPRISES, COLUMNS], for each joined rollout or for the part alone: tokens that came
    only at the token before, never before, once and earlier than that, twice, and more often.
    """
    ids, came = part.segments.ids, came_before(part)
    kind = came.int().add_(1).clamp_(max=4)
    is_same = (
        are_equal(part.tokens[1:], part.tokens[:-1]) & are_equal(ids[1:], ids[:-1]) & are_equal(came[1:], 1)
    )
    kind[1:] -= 2 * as_bytes(is_same)
    index = kind * SURPRISES + part.surprise
    counts = [one.size for one in part.rollouts]
    return tabulated_apart(index, clipped(part), 5 * SURPRISES, counts).unflatten(1, (5, SURPRISES))


class Repeats(Measure):
    """Sums of ``clipped`` by how often the token came before, and by bin of -log behavior.

    The table is [SEEN, SURPRISES, COLUMNS].
    """

    takes_joined: ClassVar[bool] = True
    version: ClassVar[int] = 2

    sums: Tensor = field(default_factory=lambda: zeros(SEEN, SURPRISES, COLUMNS))

    def add(self, part: DumpedRollout) -> None:
        if part.size and part.tokens is not None:
            for just, new, once, *more in by_repetition(part):
                self.sums += torch.stack([new, just + once, *more])


def rise(d: Diagnosis, level: int = 1) -> tuple[float, float]:
    """Returns mean l of repeated tokens minus that of equally certain new tokens, and its standard error.

    Repeated tokens came at least ``level`` times before in their response.
    """
    sums = d.of(Repeats).sums
    new, repeated = sums[0], sums[level:].sum(0)
    known = (new[:, 0] >= 10) & (repeated[:, 0] >= 10)
    if not known.any():
        return 0.0, 0.0
    n, m = new[known, 0], repeated[known, 0]
    weights = m / m.sum()
    apart = repeated[known, 1] / m - new[known, 1] / n
    of_new = (new[known, 3] / n - (new[known, 1] / n).square()).clamp_min(0) / n
    of_repeated = (repeated[known, 3] / m - (repeated[known, 1] / m).square()).clamp_min(0) / m
    error = math.sqrt(float((weights.square() * (of_new + of_repeated)).sum()))
    return float((weights * apart).sum()), error
