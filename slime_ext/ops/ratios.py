"""Log-ratios: log numerator - log behavior, in nats, one direction everywhere."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Level = Literal["token", "turn", "sequence", "geometric"]
LEVELS: tuple[str, ...] = get_args(Level)


def compared(numerator: Tensor, behavior: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What ``log_ratio`` returns; [T] bool, the response tokens whose behavior log-prob is finite; and both
    log-probs [T], detached, in float32 or the wider dtype of the two."""
    dtype = torch.promote_types(torch.promote_types(numerator.dtype, behavior.dtype), torch.float32)
    numerator, behavior = numerator.detach().to(dtype), behavior.detach().to(dtype)
    finite = mask & (behavior.abs() < torch.inf)
    return torch.where(finite, numerator - behavior, 0), finite, numerator, behavior


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
    return compared(numerator, behavior, mask)[0]
