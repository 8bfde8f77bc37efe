"""Sums tokens by block of absolute positions."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.certainty import add_by_surprise
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import SURPRISES, DumpedRollout
from slime_ext.tools.analysis.tables import zeros
from slime_ext.tools.analysis.values import integers

# Absolute positions (prompt and response) in a block; the last block holds all later ones.
BLOCK, BLOCKS = 16, 2048


class Blocks(Measure):
    """Sums by block of absolute positions and bin of -log behavior, [BLOCKS, SURPRISES, 4]."""

    takes_joined: ClassVar[bool] = True
    version: ClassVar[int] = 2

    table: Tensor = field(default_factory=lambda: zeros(BLOCKS, SURPRISES, 4))

    def add(self, part: DumpedRollout) -> None:
        positions = part.segments.within + part.segments.expand(integers(part.prompt_lengths))
        blocks = min(max(int(positions.max()), 0) // BLOCK + 1, BLOCKS) if part.size else 0
        add_by_surprise(self.table[:blocks], positions / BLOCK, part)
