"""Reduces an optimizer step's sums over all ranks to Python numbers.

It needs one SUM per step, and is the only place that waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch

from slime_ext.core.metrics.layout import (
    CURVE_COLUMNS,
    CURVES,
    HIGHEST,
    HISTOGRAM,
    LOG_SUMS,
    MetricsLayout,
)
from slime_ext.core.metrics.measure import StepSums
from slime_ext.ops.segments import AllSum, identity

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Totals:
    """Everything measured in an optimizer step on all ranks, as Python numbers."""

    sums: dict[str, float]
    highest: dict[str, float]  # maxima; a name with _min has the maximum of the negated values
    log_sums: dict[str, float]
    histogram: list[float]
    curves: dict[str, dict[str, dict[str, float]]]  # curve -> bin -> column -> sum

    def __getitem__(self, name: str) -> float:
        return self.sums[name]

    def mean(self, name: str, over: str = "counted") -> float:
        """Divides one sum by another; 0 if the other is 0."""
        return self[name] / self[over] if self[over] else 0.0

    def ess(self, total: str, square: str, over: str) -> float:
        """Computes (sum x)^2 / (n sum x^2).

        It is capped at 1, because rounding may lift it above 1.
        """
        squares = self[over] * self[square]
        return min(self[total] ** 2 / squares, 1.0) if squares else 0.0

    def quantile(self, q: float) -> float:
        """Estimates quantile ``q`` of the log-ratios of tokens.

        The error is at most 3.1% of the quantile.
        """
        if not self["counted"]:
            return 0.0
        log_ratio = HISTOGRAM.quantile(self.histogram, q)
        return min(max(log_ratio, -self.highest["log_ratio_min"]), self.highest["log_ratio_max"])


def reduce(
    layout: MetricsLayout,
    measured: StepSums | None,
    all_sum: AllSum = identity,
    rank: int = 0,
    size: int = 1,
    *,
    device: torch.device | str = "cpu",
    extra: Tensor | None = None,
) -> tuple[Totals, list[list[float]]]:
    """Adds up the sums of all ranks with one SUM.

    For numbers that are not sums, each rank has its own slot.

    Args:
        layout: the layout of ``measured``.
        measured: the sums over all micro-batches on this rank; None if it had none.
        all_sum: SUM over the data- and context-parallel ranks of a float64 vector.
        rank, size: this rank's place among them.
        device: where a rank that measured nothing makes its zeros.
        extra: [E] float64 numbers of this rank.

    Returns:
        The totals, and ``extra`` of every rank.
    """
    sums, highest, log_sums = measured or StepSums.nothing(layout, device)
    of_rank = torch.cat([highest, log_sums, *([] if extra is None else [extra.double()])])
    slots = of_rank.new_zeros(size, of_rank.numel())
    slots[rank] = of_rank
    flat = all_sum(torch.cat([sums, slots.reshape(-1)]))
    names, after = len(layout.names), len(layout.names) + HISTOGRAM.size
    histogram = HISTOGRAM.ordered(flat[names:after])
    numbers = iter(torch.cat([flat[:names], histogram, flat[after:]]).tolist())
    parts = (names, HISTOGRAM.count, layout.size - after, *[of_rank.numel()] * size)
    named, counts, curves, *per_rank = (list(islice(numbers, part)) for part in parts)
    split = len(HIGHEST) + len(LOG_SUMS)
    totals = _totals(dict(zip(layout.names, named, strict=True)), counts, curves, per_rank)
    return totals, [slot[split:] for slot in per_rank]


def _totals(
    named: dict[str, float], histogram: list[float], curves: list[float], per_rank: list[list[float]]
) -> Totals:
    columns = list(zip(*per_rank, strict=True))
    highest = {name: max(values) for name, values in zip(HIGHEST, columns, strict=False)}
    log_sums = {name: _log_sum(v) for name, v in zip(LOG_SUMS, columns[len(HIGHEST) :], strict=False)}
    around_0 = HISTOGRAM.count // 2
    histogram[around_0] += named["counted"] - sum(histogram)  # removes the tokens without a log-ratio
    return Totals(named, highest, log_sums, histogram, _curves(curves))


def _curves(values: Sequence[float]) -> dict[str, dict[str, dict[str, float]]]:
    if not values:
        return {}
    width, numbers = len(CURVE_COLUMNS), iter(values)
    rows: Iterator[dict[str, float]] = (
        dict(zip(CURVE_COLUMNS, row, strict=True)) for row in zip(*[numbers] * width, strict=True)
    )
    return {curve: {label: next(rows) for label in labels} for curve, labels in CURVES.items()}


def _log_sum(logs: Sequence[float]) -> float:
    """Computes the log of the sum of exp(x); -inf if all are -inf."""
    highest = max(logs)
    if math.isinf(highest):
        return highest
    return highest + math.log(math.fsum(math.exp(x - highest) for x in logs))
