"""Log-probs of chosen tokens from logits that ranks share, each holding a part of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slime_ext.ops.divergences import wide
from slime_ext.ops.segments import AllSum, chunks, identity

AT_ONCE = 2**24  # logits that are read at once, in float32: bounds the memory beside [T, K]


def log_probs_at(
    logits: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    offset: int = 0,
    part: int = 0,
    parts: int = 1,
    all_sum: AllSum = identity,
) -> Tensor:
    """log softmax over the whole vocabulary, at the given tokens: one SUM over the ranks.

        log p_v = logit_v / temperature - log sum over u of e^(logit_u / temperature)

    Args:
        logits: [T, V / parts] this rank's part of the vocabulary, with grad.
        ids: [T, K] token ids, the same on every rank; one that no rank holds (padding) reads as logit 0.
        temperature: of the sampling, > 0; divides in float32 or more.
        offset: the id of this rank's first token.
        part: this rank's number among the ``parts`` ranks.
        all_sum: SUM over the ranks that share the vocabulary; it may work in place.

    Returns:
        [T, K] nats, the same on every rank, in float32 or more. The gradient is that of this rank's logits,
        once: every rank computes the same loss, so nothing is added up on the way back.
    """
    log_probs: Tensor = _LogProbsAt.apply(  # type: ignore[no-untyped-call]
        logits, ids.long() - offset, temperature, part, parts, all_sum
    )
    return log_probs


class _LogProbsAt(torch.autograd.Function):
    """Reads a few rows at a time and keeps none of them for the way back, so beside the gradient of the
    logits the memory is [T, K]."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, at: Tensor, temperature: float, part: int, parts: int, all_sum: AllSum
    ) -> Tensor:
        held = (at >= 0) & (at < logits.shape[1])
        at = at.clamp(0, logits.shape[1] - 1)
        # The maxima stay on their ranks: each puts log sum exp of its part into a slot of its own.
        dtype = wide(logits.dtype)
        found = torch.zeros(len(at), parts + at.shape[1], dtype=dtype, device=logits.device)
        for rows in chunks(logits, AT_ONCE):
            some = logits[rows].to(dtype, copy=True).div_(temperature)
            found[rows, parts:] = torch.where(held[rows], some.gather(1, at[rows]), 0)
            # The maximum is subtracted before exp, which would overflow; -inf - -inf would be NaN, so a row
            # whose logits are all -inf subtracts the lowest number instead.
            most = some.amax(1, keepdim=True).clamp_min(torch.finfo(some.dtype).min)
            found[rows, part] = most[:, 0] + some.sub_(most).exp_().sum(1).log()
            del some  # before the next rows are read
        found = all_sum(found)
        total = found[:, :parts].logsumexp(1, keepdim=True)
        ctx.temperature = temperature
        ctx.save_for_backward(logits, at, held, total)
        return found[:, parts:] - total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        """Every rank computes the same loss, so a rank's logits get their part of the gradient once."""
        logits, at, held, total = ctx.saved_tensors
        of_log_p = slopes[0].to(total.dtype) / ctx.temperature
        gradient = torch.empty_like(logits)
        for rows in chunks(logits, AT_ONCE):
            some = logits[rows].to(total.dtype, copy=True).div_(ctx.temperature).sub_(total[rows]).exp_()
            some.mul_(-of_log_p[rows].sum(1, keepdim=True))
            gradient[rows] = some.scatter_add_(1, at[rows], torch.where(held[rows], of_log_p[rows], 0))
            del some
        return gradient, None, None, None, None, None
