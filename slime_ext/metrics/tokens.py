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

from slime_ext.ops.segments import as_numbers

PER_DECADE, SMALLEST, DECADES = 32, -6, 8
BINS = DECADES * PER_DECADE  # on each side; with one around 0 and one beyond each end 2 BINS + 3 in all
QUANTILES = {"ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99}
SUMS = ("count", "nonfinite", "l", "excess", "excess_squared", "weight_count", "weight", "weight_squared")


def bins(log_ratio: Tensor) -> Tensor:
    """[T] -> [T] int64, the bin of each log-ratio: 32 per decade of |l| from 1e-6 to 100 nats, on both sides
    of 0."""
    decades = log_ratio.abs().log10_()
    distance = decades.sub_(SMALLEST).mul_(PER_DECADE).floor_().add_(1).clamp_(0, BINS + 1)
    return distance.copysign_(log_ratio).add_(BINS + 1).long()


class TokenStatistics:
    """Accumulates over one optimizer step what the mismatch metrics are made of.

    A quantile read from it is off by at most half a bin, 3.7% of |log-ratio|.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self._histogram = torch.zeros(2 * BINS + 3, dtype=torch.float64, device=device)

    def add(self, log_ratio: Tensor, mask: Tensor, *, weights: Tensor | None = None) -> None:
        """Adds the tokens of one micro-batch, without waiting for the device.

        Args:
            log_ratio: [T] log proximal - log behavior, nats; NaN or infinite where a log-prob was.
            mask: [T] response mask.
            weights: [T] the weights that multiplied the loss, 0 at rejected tokens.
        """
        mask = mask.to(torch.bool)
        finite = mask & (log_ratio.detach().abs() < torch.inf)
        log_ratio = torch.where(finite, log_ratio.detach(), 0)
        excess = torch.expm1(log_ratio)  # the ratio less 1: its sums lose no digits where policies are close
        counted = as_numbers(finite, torch.float64)
        count = counted.sum()
        parts = [count, _sum(mask) - count, _sum(log_ratio), _sum(excess), _sum(excess.double().square())]
        self._sums += torch.stack([*parts, *self._of_weights(mask, weights)])
        self._histogram.index_add_(0, bins(log_ratio), counted)

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
        count = total["count"]
        n = max(count, 1)
        metrics = {
            "k1": -total["l"] / n,
            "k3": (total["excess"] - total["l"]) / n,
            "ratio_mean": (total["excess"] + count) / n,
            "ess": _ess(
                count, total["excess"] + count, total["excess_squared"] + 2 * total["excess"] + count
            ),
            "nonfinite_fraction": total["nonfinite"] / max(count + total["nonfinite"], 1),
            **_quantiles(values[len(SUMS) :]),
        }
        if total["weight_count"]:
            metrics["weight_mean"] = total["weight"] / total["weight_count"]
            metrics["ess_weight"] = _ess(total["weight_count"], total["weight"], total["weight_squared"])
        return {f"mismatch/{name}": value for name, value in metrics.items()}

    def _of_weights(self, mask: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if weights is None:
            return (self._sums.new_zeros(()),) * 3
        weights = torch.where(mask, weights.detach(), 0).double()
        return _sum(mask), weights.sum(), weights.square().sum()


def _sum(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float64)


def _quantiles(histogram: list[float]) -> dict[str, float]:
    below = list(accumulate(histogram))
    if not below[-1]:
        return dict.fromkeys(QUANTILES, 0.0)
    found = {
        name: next(i for i, c in enumerate(below) if c >= q * below[-1]) for name, q in QUANTILES.items()
    }
    return {name: math.exp(_middle(i)) for name, i in found.items()}


def _ess(count: float, total: float, square: float) -> float:
    if math.isinf(square):
        return 1 / count  # one ratio outweighs all others
    return total * total / (count * square) if square else 0.0


def _middle(index: int) -> float:
    """The log-ratio that stands for a bin: its geometric middle, 0 for the one around 0."""
    side = index - BINS - 1
    return math.copysign(10 ** (SMALLEST + (abs(side) - 0.5) / PER_DECADE), side) if side else 0.0
