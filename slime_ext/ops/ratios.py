"""Log-ratios: log numerator - log behavior, in nats, one direction everywhere."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from slime_ext.ops.segments import Segments

Level = Literal["token", "turn", "sequence", "geometric"]
LEVELS: tuple[str, ...] = get_args(Level)


def selected(numerator: Tensor, behavior: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The two log-probs, detached and in float32 or better, with everything that must not be read put to a
    ratio of 1.

    Args:
        numerator: [T] log-probs, nats; anything where ``mask`` is false.
        behavior: [T] log-probs, nats; may be NaN or infinite, which makes the token not finite.
        mask: [T] bool.

    Returns:
        numerator, behavior, and [T] bool: a response token whose behavior log-prob is finite.
    """
    dtype = torch.promote_types(torch.promote_types(numerator.dtype, behavior.dtype), torch.float32)
    numerator = torch.where(mask, numerator.detach().to(dtype), 0)
    finite = mask & behavior.isfinite()
    return numerator, torch.where(finite, behavior.detach().to(dtype), numerator), finite


def log_ratio(numerator: Tensor, behavior: Tensor, mask: Tensor) -> Tensor:
    """log numerator - log behavior at response tokens, 0 elsewhere and where the behavior log-prob is not
    finite.

    Args:
        numerator: [T] log-probs of the sampled tokens, nats.
        behavior: [T] log-probs under the policy that sampled them, nats.
        mask: [T] bool response mask.

    Returns:
        [T] nats, detached, float32 or the wider dtype of the inputs.
    """
    numerator, behavior, _ = selected(numerator, behavior, mask)
    return numerator - behavior


def at_level(log_ratio: Tensor, level: Level, segments: Segments) -> Tensor:
    """The log-ratio of the unit that ``level`` names, at each of its tokens.

    token: itself; turn and sequence: the sum over the unit (the ratio's product); geometric: the mean over
    the sequence.

    Args:
        log_ratio: [T] nats.

    Returns:
        [T] float64 (token: the dtype of the input), the same at every token of a unit.
    """
    if level == "token":
        return log_ratio
    if level == "turn":
        return segments.all_sum(segments.turn_sum_shares(log_ratio)).index_select(0, segments.turn_ids)
    return segments.spread(segments.sum(log_ratio) if level == "sequence" else segments.mean(log_ratio))


def sequence_mean(log_ratio: Tensor, segments: Segments) -> Tensor:
    """GSPO's sequence log-ratio at each token: the mean over the response tokens, with its gradient.

    ``segments.all_sum`` must be differentiable where several ranks share a sequence.

    Args:
        log_ratio: [T] log target - log anchor, nats, with grad.

    Returns:
        [T] nats in the dtype of the input.

    Source: Zheng et al. 2025, https://arxiv.org/abs/2507.18071.
    """
    return segments.spread(segments.mean(log_ratio)).to(log_ratio.dtype)
