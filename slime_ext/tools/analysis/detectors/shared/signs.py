"""Sums far tokens by the sign of their log-ratio."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

from torch import Tensor

from slime_ext.ops.segments import as_bytes
from slime_ext.tools.analysis.detectors.shared.clipped import COLUMNS, clipped
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import is_above, is_below, zeros

FAR = 0.5  # nats, |l| of a token that is far off


class Signs(Measure):
    """Sums of ``clipped`` over far tokens with l below 0, and over those with l above 0, [2, COLUMNS]."""

    takes_joined: ClassVar[bool] = True
    version: ClassVar[int] = 2

    far: Tensor = field(default_factory=lambda: zeros(2, COLUMNS))

    def add(self, part: DumpedRollout) -> None:
        above, below = is_above(part.log_ratio, FAR), is_below(part.log_ratio, -FAR)
        part.tabulate(self.far, 2 - as_bytes(above) - 2 * as_bytes(below), clipped(part))
