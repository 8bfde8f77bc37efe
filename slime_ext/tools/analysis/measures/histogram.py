"""Quantiles of more values than fit into memory: a histogram of fine bins, and the extremes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from slime_ext.ops.histogram import LogBins

BINS = LogBins(low=-40, high=64, digits=8)  # at most 0.4% of their values wide
ZERO = BINS.side + 1  # the bin around 0
BARS = LogBins(digits=3)  # of the distribution that a page shows


@dataclass
class Histogram:
    """Counts of numbers; histograms of several processes add up.

    Args:
        counts: [BINS.size] by key.
        smallest, largest: the extremes, exact.
    """

    counts: Tensor = field(default_factory=lambda: torch.zeros(BINS.size, dtype=torch.int64))
    smallest: float = float("inf")
    largest: float = float("-inf")

    def add(self, values: Tensor) -> None:
        """Counts values [N], none of which is NaN."""
        if values.numel():
            self.counts += torch.bincount(BINS.keys(values), minlength=BINS.size)
            low, high = values.aminmax()
            self.smallest, self.largest = min(self.smallest, float(low)), max(self.largest, float(high))

    def merge(self, other: Histogram) -> None:
        """Adds the counts of other values."""
        self.counts += other.counts
        self.smallest = min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)

    def quantile(self, q: float) -> float:
        """The smallest value with at least a share ``q`` at or below it, rounded towards 0 by at most 0.4%
        (1 and a cap of 2 stay as they are) and never outside the extremes. Needs at least one value."""
        below = BINS.ordered(self.counts).cumsum(0)
        wanted = min(max(q * int(below[-1]), 1), int(below[-1]))
        low, high = BINS.edges(int(torch.searchsorted(below.double(), wanted)))
        return min(max(min(max(0.0, low), high), self.smallest), self.largest)

    def sizes(self) -> tuple[Tensor, Tensor]:
        """Counts of |value| and the lower ends of their bins, [bins that hold any] float64 each, from 0
        on."""
        ordered = BINS.ordered(self.counts)
        counts = ordered[ZERO:].clone()
        counts[1:] += ordered[:ZERO].flip(0)
        held = counts.nonzero()[:, 0]
        return counts[held].double(), BINS.lower_ends(held)

    def tail(self, share: float) -> tuple[float, float, int]:
        """The threshold above which lies the largest part of the values that is at most ``share`` of them,
        for values >= 0: the upper end of the last bin below it, the lower end of the next that holds any
        (inf for none), and how many lie above."""
        counts = BINS.ordered(self.counts)[ZERO:]
        over = counts.flip(0).cumsum(0).flip(0) - counts
        last = int(((over <= int(share * int(counts.sum()))) & (counts > 0)).int().argmax())
        beyond = counts[last + 1 :].nonzero()
        after = BINS.edges(ZERO + last + 1 + int(beyond[0]))[0] if len(beyond) else float("inf")
        return BINS.edges(ZERO + last)[1], after, int(over[last])

    def bars(self) -> list[tuple[float, float, int]]:
        """Both ends, within the extremes, and count of each bar, from the first to the last that holds a
        value."""
        joined = self.counts.view(BARS.size, -1).sum(1)
        counts = BARS.ordered(joined).tolist()
        held = [i for i, count in enumerate(counts) if count]
        found = [(*BARS.edges(i), counts[i]) for i in range(held[0], held[-1] + 1)] if held else []
        return [(max(low, self.smallest), min(high, self.largest), n) for low, high, n in found]
