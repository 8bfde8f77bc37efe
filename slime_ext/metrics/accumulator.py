"""Adds up what micro-batches measured, and reduces it over the ranks: once per optimizer step, the only place
that waits for the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slime_ext.metrics.layout import (
    BINS,
    CURVE_BINS,
    CURVE_COLUMNS,
    CURVES,
    HIGHEST,
    LOG_SUMS,
    SIDE,
    Layout,
)
from slime_ext.metrics.measure import Measured, nothing
from slime_ext.metrics.totals import Totals

AllSum = Callable[[Tensor], Tensor]


class Accumulator:
    """The statistics of one optimizer step on this rank."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.measured: Measured | None = None

    def add(self, measured: Measured) -> None:
        """Adds a micro-batch, without waiting for the device."""
        self.measured = measured if self.measured is None else self.measured + measured

    def reduce(
        self,
        all_sum: AllSum = lambda values: values,
        rank: int = 0,
        size: int = 1,
        *,
        device: torch.device | str = "cpu",
        extra: Tensor | None = None,
    ) -> tuple[Totals, list[list[float]]]:
        """The totals of all ranks after one SUM; what is not a sum travels in a slot per rank.

        Args:
            all_sum: SUM over the data- and context-parallel ranks of a float64 vector.
            rank, size: this rank's place among them.
            device: where a rank that measured nothing has to bring its zeros.
            extra: [E] float64 of this rank's own.

        Returns:
            The totals, and ``extra`` of every rank.
        """
        sums, highest, log_sums = self.measured or nothing(self.layout, device)
        own = torch.cat([highest, log_sums, *([] if extra is None else [extra.double()])])
        slots = own.new_zeros(size, own.numel())
        slots[rank] = own
        flat = all_sum(torch.cat([sums, slots.reshape(-1)])).tolist()
        width, head = own.numel(), sums.numel()
        per_rank = [flat[i : i + width] for i in range(head, len(flat), width)] if width else []
        split = len(HIGHEST) + len(LOG_SUMS)
        return self._totals(flat[:head], per_rank), [slot[split:] for slot in per_rank]

    def _totals(self, sums: list[float], per_rank: list[list[float]]) -> Totals:
        names = self.layout.names
        columns = list(zip(*per_rank, strict=True))
        highest = {name: max(values) for name, values in zip(HIGHEST, columns, strict=False)}
        log_sums = {name: _log_sum(v) for name, v in zip(LOG_SUMS, columns[len(HIGHEST) :], strict=False)}
        begin = len(names)
        histogram, curves = sums[begin : begin + BINS], sums[begin + BINS :]
        named = dict(zip(names, sums, strict=False))
        return Totals(named, highest, log_sums, _in_order(histogram, named["counted"]), _curves(curves))


def _curves(values: Sequence[float]) -> dict[str, dict[str, dict[str, float]]]:
    width = len(CURVE_COLUMNS)
    rows = [
        dict(zip(CURVE_COLUMNS, values[i : i + width], strict=True)) for i in range(0, len(values), width)
    ]
    starts = range(0, len(rows), CURVE_BINS)
    return {
        curve: dict(zip(CURVES[curve], rows[start : start + CURVE_BINS], strict=True))
        for curve, start in zip(CURVES, starts, strict=False)
    }


def _log_sum(logs: Sequence[float]) -> float:
    """log of the sum of exp, -inf for none."""
    highest = max(logs)
    if math.isinf(highest):
        return highest
    return highest + math.log(math.fsum(math.exp(x - highest) for x in logs))


def _in_order(measured: Sequence[float], counted: float) -> list[float]:
    """Counts from the lowest bin to the highest; those around 0 are what the others leave."""
    below, above = measured[SIDE + 1 :], measured[: SIDE + 1]
    return [*reversed(below), counted - sum(measured), *above]
