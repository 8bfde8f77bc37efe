"""Log-probs of chosen tokens from logits that ranks share, each holding a part of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slime_ext.ops.segments import AllSum, identity


def log_probs_at(
    logits: Tensor, ids: Tensor, *, offset: int = 0, part: int = 0, parts: int = 1, all_sum: AllSum = identity
) -> Tensor:
    """log softmax over the whole vocabulary, at the given tokens: one SUM over the ranks.

        log p_v = logit_v - log sum over u of e^logit_u

    Args:
        logits: [T, V / parts] this rank's part of the vocabulary, already divided by the sampling
            temperature, with grad.
        ids: [T, K] token ids, the same on every rank; one that no rank holds (padding) reads as logit 0.
        offset: the id of this rank's first token.
        part: this rank's number among the ``parts`` ranks.
        all_sum: SUM over the ranks that share the vocabulary; it may work in place.

    Returns:
        [T, K] nats, the same on every rank, in float32 or more. The gradient is that of this rank's logits,
        once: every rank computes the same loss, so nothing is added up on the way back.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    local = ids.long() - offset
    held = (local >= 0) & (local < logits.shape[1])
    picked = torch.where(held, wide.gather(1, local.clamp(0, logits.shape[1] - 1)), 0)
    # The maxima stay on their ranks: each puts log sum exp of its part into a slot of its own.
    share = torch.zeros(parts, dtype=wide.dtype, device=wide.device)
    own = wide.logsumexp(1, keepdim=True)
    slots = torch.where(torch.arange(parts, device=wide.device) == part, own, share)
    found: Tensor = _Shared.apply(torch.cat([slots, picked], 1), all_sum)  # type: ignore[no-untyped-call]
    return found[:, parts:] - found[:, :parts].logsumexp(1, keepdim=True)


class _Shared(torch.autograd.Function):
    """A SUM over ranks whose gradient each rank keeps, as Megatron's reduce over tensor-parallel ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, all_sum: AllSum) -> Tensor:
        return all_sum(values.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
