"""Score centering: the sampler's mean of the weighted score, from the head of its distribution.

The score, the gradient of log p, has mean zero under p but not under the sampler q. So tokens from q move the
policy even where every advantage is the same. Centering subtracts that mean, which needs q over the
vocabulary; a sampler hands out its K most likely tokens, the head, and the rest, the tail, is modelled.

Source: Marek and Ryabinin 2026, https://arxiv.org/abs/2609.20807, equations 9, 12 and 14, appendix A.3.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slime_ext.ops.segments import chunks

FLOOR = 1e-6  # of the mass of a tail: with a head that is the whole vocabulary it is 0 but for rounding
CHUNK = 2**20  # entries of the head that are weighted at once: bounds the memory of what a weight needs
Weight = Callable[[Tensor, Tensor, slice], Tensor]


def centering(sampler: Tensor, trainer: Tensor, weight: Weight) -> Tensor:
    """C_t: the term that, times the advantage and added to the loss, centers the weighted score.

    With head H, q = e^sampler, p = e^trainer, masses Q and P of the head, and the weight f:

        rho   = (1 - Q) / (1 - P)                      tail masses of at least 1e-6
        alpha = rho f(1 / rho)                         q in the tail is modelled as rho p
        C_t   = sum over v in H of stopgrad(q_v f_v - alpha p_v) log p_v

    Every token stands alone: packing, and how context-parallel ranks split a sequence, change nothing.

    Args:
        sampler: [T, K] log-probs of the sampler's head, normalised over the whole vocabulary at the sampling
            temperature, nats; -inf where a head is shorter.
        trainer: [T, K] log-probs of the same tokens under the trained policy, nats, with grad.
        weight: log-probs of the trainer and of the sampler [t, K + 1], and which of the T tokens they belong
            to -> f [t, K + 1]. The last column is the tail as one token. Called without gradient.

    Returns:
        [T] nats, with a gradient through ``trainer`` alone; 0 where a token has no head.
    """
    dtype = torch.promote_types(torch.promote_types(sampler.dtype, trainer.dtype), torch.float32)
    coefficients = torch.empty(sampler.shape, dtype=dtype, device=sampler.device)
    for rows in chunks(sampler, CHUNK):
        coefficients[rows] = _coefficients(sampler[rows], trainer[rows], weight, rows, dtype)
    return (coefficients * torch.where(sampler > -torch.inf, trainer, 0)).sum(1)


@torch.no_grad()
def _coefficients(
    sampler: Tensor, trainer: Tensor, weight: Weight, rows: slice, dtype: torch.dtype
) -> Tensor:
    """[t, K] stopgrad(q_v f_v - alpha p_v), 0 where a head is shorter."""
    there = sampler > -torch.inf
    q = torch.where(there, sampler.to(dtype).exp(), 0)
    p = torch.where(there, trainer.to(dtype).exp(), 0)
    q_tail, p_tail = ((1 - mass.sum(1, keepdim=True)).clamp_min(FLOOR) for mass in (q, p))
    # A token that is not in the head reads as on-policy: its weight is not looked at.
    log_q = torch.cat([torch.where(there, sampler, 0).to(dtype), q_tail.log()], 1)
    log_p = torch.cat([torch.where(there, trainer, 0).to(dtype), p_tail.log()], 1)
    f = weight(log_p, log_q, rows).clamp(max=torch.finfo(dtype).max)
    alpha = q_tail / p_tail * f[:, -1:]
    # A sampler's probability may underflow where a weight overflows, and 0 times infinity is NaN.
    found = torch.where(q > 0, q * f[:, :-1], 0) - alpha * p
    return torch.where(there.any(1, keepdim=True), found, 0)
