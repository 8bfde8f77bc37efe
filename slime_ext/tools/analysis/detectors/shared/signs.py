"""Sums far tokens by the sign of their log-ratio."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.clipped import COLUMNS, clipped
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import zeros

FAR = 0.5  # nats, |l| of a token that is far off


@dataclass
class Signs(Measure):
    """Sums of ``clipped`` over far tokens with l below 0, and over those with l above 0, [2, COLUMNS]."""

    takes_joined: ClassVar[bool] = True
    version: ClassVar[int] = 2

    far: Tensor = field(default_factory=lambda: zeros(2, COLUMNS))

    def add(self, part: DumpedRollout) -> None:
        is_far = part.finite & (part.log_ratio.abs() > FAR)
        part.tabulate(self.far, torch.where(is_far, (part.log_ratio > 0).long(), 2), clipped(part))
