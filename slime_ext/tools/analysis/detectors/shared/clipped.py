"""Clips log-ratios, so that no single token holds all of a sum."""

from __future__ import annotations

import torch

from slime_ext.tools.analysis.measures.measure import once_per_part
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import Rows

COLUMNS = 5  # count, sum l, sum |l|, sum l^2, sum k3
LARGEST = 30.0  # nats; larger |l| count as this


@once_per_part
def clipped(part: DumpedRollout) -> Rows:
    """Returns 1, l, |l|, l^2 and k3 of each token, COLUMNS rows [T]; 0 where l is unknown.

    |l| is at most LARGEST, and k3 at most that of |l| = 5.
    """
    count, absolute, squared, log_ratio, _, near = part.columns
    pairs = part.pairs
    if part.size and float(absolute.max()) > LARGEST:
        absolute, log_ratio = absolute.clamp(max=LARGEST), log_ratio.clamp(-LARGEST, LARGEST)
        squared = absolute.square()
        pairs = pairs[0], torch.complex(absolute, squared)
    rows = count, log_ratio, absolute, squared, near
    return Rows.of(rows, {(0, 4): pairs[0], (2, 3): pairs[1]})
