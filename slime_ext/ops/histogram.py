"""Counts numbers in bins over many powers of 2.

The leading bits of a float32 number are its bin, so one shift finds the bin. Histograms with the same bins
can be added over micro-batches, files and ranks.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

MANTISSA, BIAS = 23, 127  # a float32 has 23 bits of mantissa, and stores its exponent plus 127


@dataclass(frozen=True)
class LogBins:
    """Divides the numbers into bins: 2^digits per power of 2, on both sides of 0.

    On each side the bins reach from 2^low to 2^high. One more bin surrounds 0, and one lies beyond each end.
    A bin is at most 2^-digits wide, relative to its edge nearer to 0.

    >>> bins = LogBins(low=-1, high=2, digits=1)
    >>> keys = bins.keys(torch.tensor([-0.5, 0.1, 3.0, 9.0]))
    >>> counts = bins.ordered(torch.bincount(keys, minlength=bins.size))
    >>> [(bins.edges(i), int(n)) for i, n in enumerate(counts) if n]
    [((-0.75, -0.5), 1), ((-0.5, 0.5), 1), ((3.0, 4.0), 1), ((4.0, inf), 1)]
    """

    low: int = -20
    high: int = 7
    digits: int = 4

    @cached_property
    def size(self) -> int:
        """The number of keys."""
        return 1 << (9 + self.digits)  # sign, exponent, leading digits

    @cached_property
    def side(self) -> int:
        """The number of bins from 2^low to 2^high, on one side of 0."""
        return (self.high - self.low) << self.digits

    @cached_property
    def count(self) -> int:
        """The number of bins."""
        return 2 * self.side + 3

    def keys(self, values: Tensor) -> Tensor:
        """Computes the key of each value. Values are counted by key.

        Args:
            values: [T], detached; NaN has a key, too.

        Returns:
            [T] int32, from 0 to size - 1.
        """
        return (values.float().view(torch.int32) >> (MANTISSA - self.digits)).add_(self.size // 2)

    def places(self, keys: Any) -> Any:
        """Returns the bin of each key, [N], dimensionless; a tensor or an array as ``keys`` is.

        ``ordered`` sums counts over the keys of a bin. This is for few keys, without a table of all.

        >>> bins = LogBins(low=-1, high=2, digits=1)
        >>> bins.places(bins.keys(torch.tensor([-0.5, 0.1, 3.0, 9.0]))).tolist()
        [6, 7, 13, 14]
        """
        half = self.size // 2
        distance = (keys % half - ((BIAS + self.low) << self.digits) + 1).clip(0, self.side + 1)
        return self.side + 1 + (2 * (keys >= half) - 1) * distance

    def ordered(self, counts: Tensor) -> Tensor:
        """Turns counts by key into counts by bin: [size] -> [count].

        The bins are ordered from the lowest values to the highest.
        """
        below, above = counts.view(2, -1).unbind()  # each is ordered by growing distance from 0
        first = (BIAS + self.low) << self.digits
        last = first + self.side
        outer, inner = (
            [x[at].sum(0, keepdim=True) for x in (below, above)] for at in (slice(last, None), slice(first))
        )
        return torch.cat(
            [outer[0], below[first:last].flip(0), inner[0] + inner[1], above[first:last], outer[1]]
        )

    def edges(self, index: int) -> tuple[float, float]:
        """Returns the two ends of a bin."""
        place = index - self.side - 1
        if not place:
            return -self._edge(0), self._edge(0)
        near = self._edge(abs(place) - 1)
        far = math.inf if abs(place) > self.side else self._edge(abs(place))
        return (near, far) if place > 0 else (-far, -near)

    def lower_ends(self, places: Tensor) -> Tensor:
        """Returns each bin's end nearer to 0, as a distance from 0.

        Args:
            places: [N] distance of each bin from the bin around 0, counted in bins.

        Returns:
            [N] float64; 0 for the bin around 0.
        """
        steps, index = 1 << self.digits, (places - 1).clamp(min=0)
        ends = torch.ldexp(1 + (index % steps).double() / steps, index // steps + self.low)
        return torch.where(places > 0, ends, 0)

    def quantile(self, counts: Sequence[float], q: float) -> float:
        """Returns the geometric middle of the bin that holds quantile ``q``.

        Args:
            counts: [count], not all 0.

        Returns:
            0 for the bin around 0; an infinity for a bin beyond the ends.
        """
        below = list(accumulate(counts))
        low, high = self.edges(bisect_left(below, q * below[-1]))
        return math.copysign(math.sqrt(low * high), low) if low * high > 0 else 0.0

    def _edge(self, index: int) -> float:
        exponent, step = divmod(index, 1 << self.digits)
        return math.ldexp(1 + step / (1 << self.digits), exponent + self.low)
