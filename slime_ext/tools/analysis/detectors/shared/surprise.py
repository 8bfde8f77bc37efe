"""Sums tokens by how certain the sampler was of them."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.clipped import COLUMNS, clipped
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import SURPRISES, DumpedRollout
from slime_ext.tools.analysis.tables import Rows, zeros


class BySurprise(Measure):
    """Sums of ``clipped`` by bin of -log behavior; the last column sums -log behavior."""

    takes_joined: ClassVar[bool] = True
    version: ClassVar[int] = 2

    sums: Tensor = field(default_factory=lambda: zeros(SURPRISES, COLUMNS + 1))

    def add(self, part: DumpedRollout) -> None:
        if part.size:
            surprise = -part.compared(part.behavior).double()
            rows = clipped(part)
            part.tabulate(self.sums, part.surprise, Rows.of((*rows, surprise), rows.pairs))
