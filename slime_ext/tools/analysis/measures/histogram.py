"""Keeps quantiles of more values than fit into memory, in a histogram of fine bins."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor

from slime_ext.ops.histogram import LogBins

BINS = LogBins(low=-40, high=64, digits=8)  # each at most 0.4% of its value wide
ZERO = BINS.side + 1  # the bin around 0
LOWER_ENDS = BINS.lower_ends(torch.arange(ZERO + 1))  # by distance from it, because every rollout reads them
MOST_PIECES = 8  # joining them takes as long as adding one to all bins, and each may hold many
SPARSE = 32  # keys for each value from which sorting the values is faster than counting by key
BARS = LogBins(digits=3)  # of the distribution on the page


@dataclass
class Histogram:
    """Counts of numbers by bin. Histograms of several processes add up.

    A rollout has values in a few hundred of the 131,072 bins, so only these are kept.

    Args:
        pieces: keys of bins and number of values in each, [N], for each call of ``add``, until
            they are joined.
        smallest, largest: the extremes, exact.
    """

    pieces: list[tuple[numpy.ndarray, numpy.ndarray]] = field(default_factory=list)
    smallest: float = float("inf")
    largest: float = float("-inf")

    def add(self, values: Tensor) -> None:
        """Counts values [N], none of which is NaN."""
        if not values.numel():
            return
        low, high = values.aminmax()
        self.smallest, self.largest = min(self.smallest, float(low)), max(self.largest, float(high))
        if low == high:  # such as the weights of a correction that only rejects
            self._append(numpy.array([int(BINS.keys(low))]), numpy.array([values.numel()]))
            return
        keys = BINS.keys(values)
        first, last = (int(key) for key in keys.aminmax())
        if SPARSE * len(keys) < last - first:
            self._append(*numpy.unique(keys.numpy(), return_counts=True))
            return
        # Values that are close to each other have few of the keys.
        counts = torch.bincount(keys.sub_(first), minlength=last + 1 - first).numpy()
        there = numpy.flatnonzero(counts != 0)  # of flags, in a fifth of the time
        self._append(there + first, counts[there])

    def merge(self, other: Histogram) -> None:
        """Adds the counts of other values."""
        for piece in other.pieces:
            self._append(*piece)
        self.smallest = min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)

    def _append(self, keys: numpy.ndarray, counts: numpy.ndarray) -> None:
        self.pieces.append((keys, counts))
        if len(self.pieces) > MOST_PIECES:
            self.pieces = [self._joined()]

    def _joined(self) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Returns the keys with a value, in rising order, and the number of values of each."""
        if len(self.pieces) == 1:
            return self.pieces[0]
        counts = self.counts.numpy()
        keys = numpy.flatnonzero(counts != 0)
        return keys, counts[keys]

    def __getstate__(self) -> dict[str, Any]:
        """Joins the pieces of a histogram that goes to another process."""
        return vars(self) | {"pieces": [self._joined()] if self.pieces else []}

    @property
    def counts(self) -> Tensor:
        """The number of values by key, [BINS.size]."""
        counts = numpy.zeros(BINS.size, dtype=numpy.int64)
        for keys, more in self.pieces:
            counts[keys] += more
        return torch.from_numpy(counts)

    def quantiles(self, *shares: float) -> list[float]:
        """Returns, for each share, the smallest value with at least that share at or below it.

        It is rounded towards 0 by at most 0.4% (1 and 2 stay exact), and never outside the extremes. Without
        counts it is the smallest value, because kept figures of a run have the extremes alone.
        """
        if not self.pieces:
            return [self.smallest] * len(shares)
        keys, counts = self._joined()
        places = BINS.places(keys)
        order = places.argsort(kind="stable")
        below = counts[order].cumsum()
        total = int(below[-1])
        ranks = [math.ceil(min(max(q * total, 1), total)) for q in shares]
        edges = map(BINS.edges, places[order[below.searchsorted(ranks)]].tolist())
        return [min(max(min(max(0.0, low), high), self.smallest), self.largest) for low, high in edges]

    def sizes(self) -> tuple[Tensor, Tensor]:
        """Returns counts of |value| and the lower ends of their bins, in rising order.

        Both are [bins with a value] float64.
        """
        keys, counts = self._joined()
        by_distance = numpy.bincount(numpy.abs(BINS.places(keys) - ZERO), counts)
        held = torch.from_numpy(numpy.flatnonzero(by_distance != 0))
        return torch.from_numpy(by_distance)[held], LOWER_ENDS[held]

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
        if not self.pieces:
            return []
        joined = self.counts.view(BARS.size, -1).sum(1)
        counts = BARS.ordered(joined).tolist()
        held = [i for i, count in enumerate(counts) if count]
        bars = [(*BARS.edges(i), counts[i]) for i in range(held[0], held[-1] + 1)]
        return [(max(low, self.smallest), min(high, self.largest), n) for low, high, n in bars]
