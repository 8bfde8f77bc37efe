"""Keeps quantiles of more values than fit into memory, in a histogram of fine bins."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slime_ext.ops.histogram import LogBins

BINS = LogBins(low=-40, high=64, digits=8)  # each at most 0.4% of its value wide
ZERO = BINS.side + 1  # the bin around 0
LOWER_ENDS = BINS.lower_ends(torch.arange(ZERO + 1))  # by distance from it, because every rollout reads them
BARS = LogBins(digits=3)  # of the distribution on the page


@dataclass
class Histogram:
    """Counts of numbers by bin. Histograms of several processes add up.

    Args:
        counts: [BINS.size] by key; empty before the first value, because it takes 1 MB.
        smallest, largest: the extremes, exact.
    """

    counts: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    smallest: float = float("inf")
    largest: float = float("-inf")

    def add(self, values: Tensor) -> None:
        """Counts values [N], none of which is NaN."""
        if not values.numel():
            return
        if not len(self.counts):
            self.counts = torch.zeros(BINS.size, dtype=torch.int64)
        low, high = values.aminmax()
        self.smallest, self.largest = min(self.smallest, float(low)), max(self.largest, float(high))
        if low == high:  # such as the weights of a correction that only rejects
            self.counts[int(BINS.keys(low))] += values.numel()
            return
        keys = BINS.keys(values)
        first, last = (int(key) for key in keys.aminmax())
        # Values that are close to each other have few of the 131,072 keys.
        self.counts[first : last + 1] += torch.bincount(keys.sub_(first), minlength=last + 1 - first)

    def merge(self, other: Histogram) -> None:
        """Adds the counts of other values."""
        if not len(self.counts):
            self.counts = other.counts.clone()
        elif len(other.counts):
            self.counts += other.counts
        self.smallest = min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)

    def quantiles(self, *shares: float) -> list[float]:
        """Returns, for each share, the smallest value with at least that share at or below it.

        It is rounded towards 0 by at most 0.4% (1 and 2 stay exact), and never outside the extremes. The
        histogram needs at least one value.
        """
        below = BINS.ordered(self.counts).cumsum(0)
        total = int(below[-1])
        ranks = torch.tensor([math.ceil(min(max(q * total, 1), total)) for q in shares])
        edges = map(BINS.edges, torch.searchsorted(below, ranks).tolist())
        return [min(max(min(max(0.0, low), high), self.smallest), self.largest) for low, high in edges]

    def sizes(self) -> tuple[Tensor, Tensor]:
        """Returns counts of |value| and the lower ends of their bins, in rising order.

        Both are [bins with a value] float64.
        """
        ordered = BINS.ordered(self.counts)
        counts = ordered[ZERO:].clone()
        counts[1:] += ordered[:ZERO].flip(0)
        held = counts.nonzero()[:, 0]
        return counts[held].double(), LOWER_ENDS[held]

    def tail(self, share: float) -> tuple[float, float, int]:
        """Returns the lowest threshold that at most ``share`` of the values are above, for values >= 0.

        The result is the upper end of the last bin below it, the lower end of the next bin with a value
        (inf if none), and the number of values above.
        """
        counts = BINS.ordered(self.counts)[ZERO:]
        over = counts.flip(0).cumsum(0).flip(0) - counts
        last = int(((over <= int(share * int(counts.sum()))) & (counts > 0)).int().argmax())
        beyond = counts[last + 1 :].nonzero()
        after = BINS.edges(ZERO + last + 1 + int(beyond[0]))[0] if len(beyond) else float("inf")
        return BINS.edges(ZERO + last)[1], after, int(over[last])

    def bars(self) -> list[tuple[float, float, int]]:
        """Returns both ends and the count of each bar, from the first to the last with a value.

        The ends are within the extremes.
        """
        if not len(self.counts):
            return []
        joined = self.counts.view(BARS.size, -1).sum(1)
        counts = BARS.ordered(joined).tolist()
        held = [i for i, count in enumerate(counts) if count]
        bars = [(*BARS.edges(i), counts[i]) for i in range(held[0], held[-1] + 1)]
        return [(max(low, self.smallest), min(high, self.largest), n) for low, high, n in bars]
