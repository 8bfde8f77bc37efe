"""Computes summaries of a batch: effective sample size, perplexity, masked mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_WEIGHT = 1e140  # the square of a sum of 1e10 such weights is still finite in float64


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Averages the values over the tokens where ``mask`` is true; 0 if there are none.

    Args:
        values: [T].
        mask: [T] bool.

    Returns:
        A scalar, float64.
    """
    counted = torch.where(mask, values, 0).double()
    return counted.sum() / mask.sum().clamp_min(1)


def ess(weights: Tensor, mask: Tensor) -> Tensor:
    """Computes the effective sample size as a fraction: (sum x)^2 / (n sum x^2).

    Args:
        weights: [T] weights or ratios, >= 0. A weight above 1e140 counts as 1e140. Where ``mask`` is false,
            they may hold anything.
        mask: [T] bool, the tokens that count.

    Returns:
        A scalar in (0, 1], or 0 if no token counts or all weights are 0.

    Source: Kish 1965; Owen 2013, Monte Carlo theory, chapter 9.

    >>> ess(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([True, True, True]))
    tensor(0.6667, dtype=torch.float64)
    """
    # float64, because the square of a float32 weight above 1.8e19 is infinite in float32.
    counted = torch.where(mask, weights, 0).double().clamp(max=LARGEST_WEIGHT)
    total, square = counted.sum(), counted.square().sum()
    return torch.where(square > 0, total.square() / (mask.sum() * square), 0)


def perplexity(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Computes the perplexity, exp(-mean log-prob), of the tokens where ``mask`` is true.

    Args:
        log_probs: [T] nats.
        mask: [T] bool.

    Returns:
        A scalar, float64; 1 if ``mask`` is nowhere true.
    """
    return (-masked_mean(log_probs, mask)).exp()
