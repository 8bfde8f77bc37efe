"""Summaries of a batch: effective sample size, perplexity, masked mean. Each is a ratio of sums that add up
over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_WEIGHT = 1e140  # the square of the sum of 1e10 of them is finite in float64


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the tokens where ``mask`` is true; 0 for none. [T], [T] bool -> scalar, float64."""
    counted = torch.where(mask, values, 0).double()
    return counted.sum() / mask.sum().clamp_min(1)


def ess(weights: Tensor, mask: Tensor) -> Tensor:
    """Effective sample size as a fraction: (sum x)^2 / (n sum x^2), in (0, 1], 0 when nothing is kept.

    Args:
        weights: [T] weights or ratios, >= 0, counted as 1e140 at most; anything where ``mask`` is false.
        mask: [T] bool, which of them count.

    Source: Kish 1965; Owen 2013, Monte Carlo theory, chapter 9.

    >>> ess(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([True, True, True]))
    tensor(0.6667, dtype=torch.float64)
    """
    # float64, because the square of a float32 weight above 1.8e19 is infinite in float32.
    counted = torch.where(mask, weights, 0).double().clamp(max=LARGEST_WEIGHT)
    total, square = counted.sum(), counted.square().sum()
    return torch.where(square > 0, total.square() / (mask.sum() * square), 0)


def perplexity(log_probs: Tensor, mask: Tensor) -> Tensor:
    """exp(-mean log-prob) over the tokens where ``mask`` is true; 1 for none. [T] nats, [T] bool -> scalar,
    float64."""
    return (-masked_mean(log_probs, mask)).exp()
