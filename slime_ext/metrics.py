"""Mismatch metrics from sufficient statistics: counts, sums and a histogram that add up over micro-batches
and ranks.

Nothing here reads the device until ``reduce``, which is called once per optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from slime_ext.ops import divergences

PER_DECADE, SMALLEST, DECADES = 32, -6, 8
QUANTILES = {"ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99}
SUMS = (
    "count",
    "nonfinite",
    "k1",
    "k3",
    "ratio",
    "ratio_squared",
    "weight_count",
    "weight",
    "weight_squared",
)


def edges(device: torch.device | str = "cpu") -> Tensor:
    """Borders of the log-ratio histogram: 32 per decade of |l| from 1e-6 to 100 nats, on both sides of 0."""
    steps = DECADES * PER_DECADE + 1
    positive = torch.logspace(SMALLEST, SMALLEST + DECADES, steps, dtype=torch.float64, device=device)
    return torch.cat([-positive.flip(0), positive])


class TokenStatistics:
    """Accumulates over one optimizer step what the mismatch metrics are made of.

    A quantile read from it is off by at most half a bin, 3.7% of |log-ratio|.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._edges = edges(device)
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self._histogram = torch.zeros(len(self._edges) + 1, dtype=torch.float64, device=device)

    def add(self, log_ratio: Tensor, mask: Tensor, *, weights: Tensor | None = None) -> None:
        """Adds the tokens of one micro-batch, without waiting for the device.

        Args:
            log_ratio: [T] log proximal - log behavior, nats; NaN or infinite where a log-prob was.
            mask: [T] response mask.
            weights: [T] the weights that multiplied the loss, 0 at rejected tokens.
        """
        mask = mask != 0
        finite = mask & log_ratio.isfinite()
        l = torch.where(finite, log_ratio.detach(), 0).double()  # noqa: E741 - the letter of the definitions
        ratio = torch.where(finite, l.exp(), 0)
        w, counted = (
            (ratio.new_zeros(()),) * 2
            if weights is None
            else (
                torch.where(mask, weights.detach(), 0).double(),
                mask.sum(),
            )
        )
        sums = (finite, mask & ~finite, divergences.k1(l), divergences.k3(l), ratio, ratio.square())
        parts = [x.sum(dtype=torch.float64) for x in sums]
        parts += [x.sum(dtype=torch.float64) for x in (counted, w, w.square())]
        self._sums += torch.stack(parts)
        self._histogram.index_add_(0, torch.bucketize(l, self._edges), finite.double())

    def reduce(self, all_sum: Callable[[Tensor], Tensor] = lambda x: x) -> dict[str, float]:
        """The metrics of everything that was added on all ranks; the only place that waits for the device.

        Args:
            all_sum: SUM over data- and context-parallel ranks of a float64 vector.

        Returns:
            ``mismatch/`` k1 and k3 (estimators of KL(behavior || proximal), nats per token), ratio_mean,
            ratio_p01, ratio_p50, ratio_p99, ess (of the ratios, in (0, 1]), nonfinite_fraction; with weights
            also weight_mean and ess_weight. All 0 when nothing was added.
        """
        values = all_sum(torch.cat([self._sums, self._histogram])).tolist()
        total = dict(zip(SUMS, values, strict=False))
        count = max(total["count"], 1)
        metrics = {
            "k1": total["k1"] / count,
            "k3": total["k3"] / count,
            "ratio_mean": total["ratio"] / count,
            "ess": _ess(total["count"], total["ratio"], total["ratio_squared"]),
            "nonfinite_fraction": total["nonfinite"] / max(total["count"] + total["nonfinite"], 1),
            **self._quantiles(values[len(SUMS) :]),
        }
        if total["weight_count"]:
            metrics["weight_mean"] = total["weight"] / total["weight_count"]
            metrics["ess_weight"] = _ess(total["weight_count"], total["weight"], total["weight_squared"])
        return {f"mismatch/{name}": value for name, value in metrics.items()}

    def _quantiles(self, histogram: list[float]) -> dict[str, float]:
        below = list(accumulate(histogram))
        if not below[-1]:
            return dict.fromkeys(QUANTILES, 0.0)
        bins = {
            name: next(i for i, c in enumerate(below) if c >= q * below[-1]) for name, q in QUANTILES.items()
        }
        return {name: math.exp(_middle(i)) for name, i in bins.items()}


def _ess(count: float, total: float, square: float) -> float:
    if math.isinf(square):
        return 1 / count  # one ratio outweighs all others
    return total * total / (count * square) if square else 0.0


def _middle(index: int) -> float:
    """The log-ratio that stands for a bin: its geometric middle, 0 for the one around 0."""
    half = DECADES * PER_DECADE + 1
    if index == half:
        return 0.0
    distance = abs(index - half) - 0.5
    return math.copysign(10 ** (SMALLEST + distance / PER_DECADE), index - half)
