"""Log-ratios: log numerator - log behavior, in nats, one direction everywhere."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from slime_ext.ops.segments import Segments

Level = Literal["token", "turn", "sequence", "geometric"]
LEVELS: tuple[str, ...] = get_args(Level)


def finite_tokens(behavior: Tensor, mask: Tensor) -> Tensor:
    """[T] bool: response tokens whose behavior log-prob is finite."""
    return mask & (behavior.detach().abs() < torch.inf)


def in_common(numerator: Tensor, behavior: Tensor) -> tuple[Tensor, Tensor]:
    """Both log-probs detached, in float32 or the wider dtype of the two."""
    dtype = torch.promote_types(torch.promote_types(numerator.dtype, behavior.dtype), torch.float32)
    return numerator.detach().to(dtype), behavior.detach().to(dtype)


def widened(values: Tensor) -> Tensor:
    """Detached, in float32 or more, to be added up."""
    return values.detach().to(torch.promote_types(values.dtype, torch.float32))


def log_ratio(numerator: Tensor, behavior: Tensor, mask: Tensor) -> Tensor:
    """log numerator - log behavior at response tokens, 0 elsewhere and where behavior is not finite.

    Args:
        numerator: [T] log-probs of the sampled tokens, nats.
        behavior: [T] log-probs under the policy that sampled them, nats.
        mask: [T] bool response mask.

    Returns:
        [T] nats, detached, float32 or the wider dtype of the inputs.
    """
    numerator, behavior = in_common(numerator, behavior)
    return torch.where(finite_tokens(behavior, mask), numerator - behavior, 0)


def sequence_mean(log_ratio: Tensor, segments: Segments) -> Tensor:
    """GSPO's sequence log-ratio at each token: the mean over the response tokens, with its gradient.

    ``segments.all_sum`` must be differentiable where several ranks share a sequence.

    Args:
        log_ratio: [T] log target - log anchor, nats, with grad.

    Returns:
        [T] nats in the dtype of the input.

    Source: Zheng et al. 2025, https://arxiv.org/abs/2507.18071.
    """
    return segments.expand(segments.mean(log_ratio)).to(log_ratio.dtype)
