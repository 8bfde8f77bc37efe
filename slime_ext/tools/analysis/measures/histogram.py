"""Counts of numbers in buckets of their size: quantiles of more values than fit into memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

LOW = 15  # trailing bits of a float32 that share a bucket: 8 bits of the mantissa are left
SIDE = 1 << (31 - LOW)  # buckets on each side of 0


def _index(values: Tensor) -> Tensor:
    bits = (values.float() + 0.0).view(torch.int32)  # + 0.0 makes -0.0 positive
    size = (bits & 0x7FFFFFFF) >> LOW
    return torch.where(bits < 0, SIDE - 1 - size, SIDE + size)


def size_at(bucket: Tensor) -> Tensor:
    """The end of a bucket next to 0, for buckets [N] counted from 0 outwards: [N] float64.

    >>> size_at(torch.tensor([0, 127 << 8]))
    tensor([0., 1.], dtype=torch.float64)
    """
    return (bucket.int() << LOW).view(torch.float32).double()


@dataclass
class Histogram:
    """Counts of float32 numbers by sign, exponent and the first 8 bits of the mantissa. A bucket is at most
    0.4% of its values wide; histograms of several processes add up.

    Args:
        counts: [2 SIDE] int64, from the lowest number to the highest.
        smallest, largest: the extremes, exact.
    """

    counts: Tensor = field(default_factory=lambda: torch.zeros(2 * SIDE, dtype=torch.int64))
    smallest: float = float("inf")
    largest: float = float("-inf")

    def add(self, values: Tensor) -> None:
        """Counts values [N], none of which is NaN."""
        if values.numel():
            self.counts += torch.bincount(_index(values), minlength=2 * SIDE)
            low, high = values.aminmax()
            self.smallest, self.largest = min(self.smallest, float(low)), max(self.largest, float(high))

    def merge(self, other: Histogram) -> None:
        """Adds the counts of other values."""
        self.counts += other.counts
        self.smallest = min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)

    def quantile(self, q: float) -> float:
        """The smallest value with at least a share ``q`` of all at or below it, rounded towards 0 by at most
        0.4% (1 and a cap of 2 stay as they are) and never outside the extremes. Needs at least one value."""
        below = self.counts.cumsum(0)
        wanted = min(max(q * int(below[-1]), 1), int(below[-1]))
        at = int(torch.searchsorted(below.double(), wanted)) - SIDE
        size = float(size_at(torch.tensor(max(at, -1 - at))))
        return min(max(size if at >= 0 else -size, self.smallest), self.largest)

    def by_size(self) -> Tensor:
        """[SIDE] counts of |value|, from 0 on."""
        return self.counts[SIDE:] + self.counts[:SIDE].flip(0)

    def tail(self, share: float) -> tuple[float, float, int]:
        """The threshold above which lies the largest part of the values that is at most ``share`` of them,
        for values >= 0: the upper end of the last bucket below it, the lower end of the next that holds any
        (inf for none), and how many lie above."""
        counts = self.counts[SIDE:]
        over = counts.flip(0).cumsum(0).flip(0) - counts
        last = int(((over <= int(share * int(counts.sum()))) & (counts > 0)).int().argmax())
        beyond = counts[last + 1 :].nonzero()
        after = last + 1 + int(beyond[0]) if len(beyond) else None
        low, high = size_at(torch.tensor([last + 1, after or 0])).tolist()
        return low, high if after else float("inf"), int(over[last])
