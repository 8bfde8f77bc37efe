"""Quantiles over more values than fit into memory: histograms over the leading bits of float32.

A positive float32 orders like its bits, so counting by the leading 16 bits puts every value into a bucket
whose ends differ by at most 2^-8 of it, and a second pass over the bucket that holds a rank, by the other 15
bits, finds that rank's value exactly. There is no limit at 2^24 values as in torch.quantile, and histograms
add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

LOW = 15  # trailing bits, which the first pass does not look at
BUCKETS = 1 << (31 - LOW)  # the sign bit is 0


def bits(values: Tensor) -> Tensor:
    """The bits of float32 values, which are in the same order: [N], not negative (inf allowed, NaN not) ->
    [N] int32."""
    return (values.float() + 0.0).view(torch.int32)  # + 0.0 makes -0.0 positive


def value_of(key: int) -> float:
    """The float32 that has these bits.

    >>> value_of(int(bits(torch.tensor([1.5]))[0]))
    1.5
    """
    return float(torch.tensor([key], dtype=torch.int32).view(torch.float32))


@dataclass
class BitHistogram:
    """Counts of positive numbers by the leading 16 bits of their float32, in buckets 2^-8 wide, which adds up
    over files."""

    smallest: float = float("inf")
    largest: float = float("-inf")
    counts: Tensor = field(default_factory=lambda: torch.zeros(BUCKETS, dtype=torch.int64))

    def add_where(self, values: Tensor, chosen: Tensor, count: int) -> None:
        """Counts those ``count`` of the values [N] that are chosen [N]; all others must be 0."""
        if not count:
            return
        self.counts += torch.bincount(bits(values) >> LOW, minlength=BUCKETS)
        self.counts[0] -= values.numel() - count
        left = values if count == values.numel() else torch.where(chosen, values, torch.inf)
        self.smallest = min(self.smallest, float(left.min()))
        self.largest = max(self.largest, float(values.max()))

    def merge(self, other: BitHistogram) -> None:
        """Adds another histogram over the same buckets."""
        self.counts += other.counts
        self.smallest = min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)

    def quantile(self, q: float) -> float:
        """The smallest value with at least a share ``q`` at or below it, rounded down to its bucket's lower
        end (so that 1 and a cap of 2 read as what they are), never outside the values that were counted.

        Raises:
            ValueError: nothing was counted.
        """
        below = self.counts.cumsum(0)
        total = int(below[-1]) if len(below) else 0
        if not total:
            raise ValueError("quantile: expected values, got none")
        wanted = min(max(q * total, 1), total)
        bucket = int(torch.searchsorted(below.double(), torch.tensor(wanted, dtype=torch.float64)))
        return min(max(value_of(bucket << LOW), self.smallest), self.largest)


@dataclass
class ExactRank:
    """The value that exactly ``above`` values exceed (fewer where values are equal), in two passes.

    Feed every value to ``first``, then again to ``second``; in between nothing but two histograms is held.

    Args:
        rate: largest share of the values that may exceed it.
    """

    rate: float
    total: int = 0
    above: int = 0  # values in buckets over the one that was chosen
    bucket: int = -1
    next_bucket: float = float("inf")
    high: Tensor = field(default_factory=lambda: torch.zeros(BUCKETS, dtype=torch.int64))
    low: Tensor = field(default_factory=lambda: torch.zeros(1 << LOW, dtype=torch.int64))

    def first(self, values: Tensor) -> None:
        """Counts [N] values >= 0 by their leading bits."""
        self.high += torch.bincount(bits(values) >> LOW, minlength=BUCKETS)
        self.total += values.numel()

    def choose(self) -> None:
        """Between the passes: finds the bucket that holds the rank."""
        self.bucket, self.above = _lowest(self.high, int(self.rate * self.total))

    def second(self, values: Tensor) -> None:
        """Counts the same values again: those of the chosen bucket, by their trailing bits."""
        keys = bits(values)
        high = keys >> LOW
        self.low += torch.bincount(keys[high == self.bucket] & ((1 << LOW) - 1), minlength=1 << LOW)
        beyond = values[high > self.bucket]
        if beyond.numel():
            self.next_bucket = min(self.next_bucket, float(beyond.min()))

    def merge(self, other: ExactRank, is_second: bool) -> None:
        """Adds the counts of other values in the same pass."""
        if is_second:
            self.low += other.low
            self.next_bucket = min(self.next_bucket, other.next_bucket)
        else:
            self.high += other.high
            self.total += other.total

    def result(self) -> tuple[float, float, int]:
        """The smallest value that at most ``rate * total`` values exceed, the next larger one (inf for none),
        and how many exceed it."""
        kept, over = _lowest(self.low, int(self.rate * self.total) - self.above)
        larger = self.low[kept + 1 :].nonzero()
        after = self.next_bucket
        if len(larger):
            after = value_of((self.bucket << LOW) + kept + 1 + int(larger[0]))
        return value_of((self.bucket << LOW) + kept), after, self.above + over


def _lowest(counts: Tensor, allowed: int) -> tuple[int, int]:
    """The lowest bucket that holds values and has at most ``allowed`` of them above it, and how many it
    has."""
    over = counts.flip(0).cumsum(0).flip(0) - counts
    fits = (over <= allowed) & (counts > 0)
    bucket = int(fits.int().argmax())
    return bucket, int(over[bucket])
