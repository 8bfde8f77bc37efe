"""Sums tokens by their id."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

from torch import Tensor

from slime_ext.ops.segments import as_bytes
from slime_ext.tools.analysis.detectors.shared.clipped import COLUMNS, clipped
from slime_ext.tools.analysis.measures.measure import Measure, once_per_part
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import is_below, tabulated, zeros

IDS = 4096  # token ids are counted modulo this power of 2
UNSURE = -1.0  # nats, a log-prob below which the sampler was unsure


@once_per_part
def by_id(part: DumpedRollout) -> Tensor:
    """Returns the sums of ``clipped`` by token id, [2, IDS, COLUMNS]: of other tokens, and of unsure ones."""
    is_unsure = as_bytes(part.finite & is_below(part.behavior, UNSURE))
    index = (part.tokens & (IDS - 1)).int() + IDS * is_unsure.int()
    return tabulated(index, clipped(part), 2 * IDS).view(2, IDS, COLUMNS)


class TokenIds(Measure):
    """Sums of ``clipped`` by token id, [IDS, COLUMNS]."""

    version: ClassVar[int] = 2

    sums: Tensor = field(default_factory=lambda: zeros(IDS, COLUMNS))

    def add(self, part: DumpedRollout) -> None:
        if part.size and part.tokens is not None:
            self.sums += by_id(part).sum(0)
