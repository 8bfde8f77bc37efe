"""Sums tokens by their id."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

import numpy
import torch
from torch import Tensor

from slime_ext.ops.segments import as_bytes
from slime_ext.tools.analysis.detectors.shared.clipped import COLUMNS, clipped
from slime_ext.tools.analysis.measures.measure import Measure, once_per_part
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import is_below, tabulated, zeros

IDS = 4096  # token ids are counted modulo this power of 2
UNSURE = -1.0  # nats, a log-prob below which the sampler was unsure


@once_per_part
def by_id(part: DumpedRollout) -> tuple[Tensor, Tensor]:
    """Returns the N token ids of a part in rising order, and the sums of ``clipped`` by id, [2, N, COLUMNS].

    The first sums are of other tokens, the second of unsure ones. A small part has few of all ids.
    """
    ids, numbers = (part.tokens & (IDS - 1)).numpy(), numpy.zeros(IDS, dtype=numpy.int32)
    numbers[ids] = 1
    there = numpy.flatnonzero(numbers)
    numbers[there] = numpy.arange(len(there))
    is_unsure = as_bytes(part.finite & is_below(part.behavior, UNSURE))
    index = torch.from_numpy(numbers[ids]) + len(there) * is_unsure.int()
    sums = tabulated(index, clipped(part), 2 * len(there)).view(2, len(there), COLUMNS)
    return torch.from_numpy(there), sums


class TokenIds(Measure):
    """Sums of ``clipped`` by token id, [IDS, COLUMNS]."""

    version: ClassVar[int] = 2

    sums: Tensor = field(default_factory=lambda: zeros(IDS, COLUMNS))

    def add(self, part: DumpedRollout) -> None:
        if part.size and part.tokens is not None:
            ids, sums = by_id(part)
            self.sums.index_add_(0, ids, sums.sum(0))
