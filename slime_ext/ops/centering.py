"""Score centering: the sampler's mean of the weighted score, from the head of its distribution.

The score, the gradient of log p, has mean zero under p but not under the sampler q. So tokens from q move the
policy even where every advantage is the same. Centering subtracts that mean, which needs q over the
vocabulary; a sampler hands out its K most likely tokens, the head, and the rest, the tail, is modelled.

Source: Marek and Ryabinin 2026, https://arxiv.org/abs/2609.20807, equations 9, 12 and 14, appendix A.3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slime_ext.ops.divergences import wide
from slime_ext.ops.segments import chunks

FLOOR = 1e-6  # of the mass of a tail: with a head that is the whole vocabulary it is 0 but for rounding
CHUNK = 2**20  # entries of the head that are weighted at once: bounds the memory of what a weight needs
ABSENT = -1e30  # log-prob of what a head lacks, in sampler and trainer: probability 0, on-policy
Weight = Callable[[Tensor, Tensor, slice], Tensor]


def centering(sampler: Tensor, trainer: Tensor, weight: Weight | None, counts: Tensor) -> Tensor:
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
            to -> f [t, K + 1], finite. The last column is the tail as one token. Called without gradient.
            None: f = 1.
        counts: [T] bool; where False a head may hold anything.

    Returns:
        [T] nats, with a gradient through ``trainer`` alone; 0 where a token has no head.
    """
    found: Tensor = _Term.apply(sampler, trainer, weight, counts)  # type: ignore[no-untyped-call]
    return found


class _Term(torch.autograd.Function):
    """Keeps the coefficients, which are its gradient, and nothing else of size [T, K]."""

    @staticmethod
    def forward(ctx: Any, sampler: Tensor, trainer: Tensor, weight: Weight | None, counts: Tensor) -> Tensor:
        dtype = wide(sampler.dtype, trainer.dtype)
        coefficients = torch.empty(sampler.shape, dtype=dtype, device=sampler.device)
        found = coefficients.new_empty(len(sampler))
        absent = torch.where(counts, 0.0, -torch.inf).to(dtype)[:, None]
        for rows in chunks(sampler, CHUNK):
            log_q = (sampler[rows] + absent[rows]).nan_to_num(ABSENT, torch.inf, ABSENT)
            log_p = torch.where(log_q > ABSENT, trainer[rows].to(dtype), ABSENT)
            own = coefficients[rows] = _coefficients(log_q, log_p, weight, rows)
            found[rows] = (own * log_p).sum(1)
        ctx.save_for_backward(coefficients)
        ctx.dtype = trainer.dtype
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        (coefficients,) = ctx.saved_tensors
        return None, (slopes[0][:, None] * coefficients).to(ctx.dtype), None, None


def _coefficients(log_q: Tensor, log_p: Tensor, weight: Weight | None, rows: slice) -> Tensor:
    """[t, K] q_v f_v - alpha p_v."""
    q, p = log_q.exp(), log_p.exp()
    q_tail, p_tail = ((1 - mass.sum(1, keepdim=True)).clamp_min(FLOOR) for mass in (q, p))
    alpha = q_tail / p_tail
    if weight is not None:
        f = weight(torch.cat([log_p, p_tail.log()], 1), torch.cat([log_q, q_tail.log()], 1), rows)
        # A sampler's probability may underflow where a weight overflows, and 0 times infinity is NaN.
        f = f.clamp(max=torch.finfo(q.dtype).max)
        q, alpha = q * f[:, :-1], alpha * f[:, -1:]
    return q - alpha * p
