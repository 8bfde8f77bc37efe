"""What was measured in an optimizer step on all ranks, as Python numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from slime_ext.metrics.layout import BITS, FIRST, SIDE


@dataclass(frozen=True)
class Totals:
    """Everything measured in an optimizer step on all ranks, as Python numbers."""

    sums: dict[str, float]
    highest: dict[str, float]  # the smallest are there negated
    log_sums: dict[str, float]
    histogram: list[float]
    curves: dict[str, dict[str, dict[str, float]]]  # curve -> bin -> column -> sum

    def __getitem__(self, name: str) -> float:
        return self.sums[name]

    def mean(self, name: str, over: str = "counted") -> float:
        """A sum over another; 0 where there is nothing."""
        return self[name] / self[over] if self[over] else 0.0

    def ess(self, total: str, square: str, over: str) -> float:
        """(sum x)^2 / (n sum x^2)."""
        squares = self[over] * self[square]
        return self[total] ** 2 / squares if squares else 0.0

    def quantile(self, q: float) -> float:
        """The log-ratio below which a share ``q`` of the tokens lies, off by at most 3.1% of itself."""
        below = list(accumulate(self.histogram))
        if not below[-1]:
            return 0.0
        index = next(i for i, count in enumerate(below) if count >= q * below[-1])
        return min(max(_middle(index), -self.highest["log_ratio_min"]), self.highest["log_ratio_max"])


def _middle(index: int) -> float:
    """The log-ratio that stands for a bin: its geometric middle, 0 for the one around 0."""
    side = index - SIDE - 1
    low, high = (_edge(abs(side) - k) for k in (1, 0))
    return math.copysign(math.sqrt(low * high), side) if side else 0.0


def _edge(index: int) -> float:
    """Where a bin on the positive side begins, nats."""
    exponent, step = divmod(FIRST + index, 1 << BITS)
    return math.ldexp(1 + step / (1 << BITS), exponent - 127)
