"""Clips log-ratios, so that no single token holds all of a sum."""

from __future__ import annotations

import torch
from torch import Tensor

from slime_ext.tools.analysis.measures.measure import once_per_part
from slime_ext.tools.analysis.records import DumpedRollout

COLUMNS = 4  # count, sum l, sum |l|, sum l^2
LARGEST = 30.0  # nats; larger |l| count as this


@once_per_part
def clipped(part: DumpedRollout) -> Tensor:
    """Returns 1, l, |l| and l^2 of each token, with |l| up to LARGEST, [COLUMNS, T]; 0 where l is unknown."""
    count, absolute, _, log_ratio, *_ = part.columns
    size = absolute.clamp(max=LARGEST)
    return torch.stack([count, log_ratio.clamp(-LARGEST, LARGEST), size, size.square()])
