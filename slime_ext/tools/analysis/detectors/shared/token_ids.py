"""Sums tokens by their id."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.clipped import COLUMNS, clipped
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import tabulated, zeros

IDS = 4096  # token ids are counted modulo this power of 2


@dataclass
class TokenIds(Measure):
    """Sums of ``clipped`` by token id, [IDS, COLUMNS]."""

    version: ClassVar[int] = 2

    sums: Tensor = field(default_factory=lambda: zeros(IDS, COLUMNS))

    def add(self, part: DumpedRollout) -> None:
        if part.size and part.tokens is not None:
            self.sums += tabulated(part.tokens & (IDS - 1), clipped(part), IDS)
