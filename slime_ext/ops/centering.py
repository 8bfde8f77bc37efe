"""Score centering: the sampler's mean of the weighted score, from the tokens that it could have drawn.

The score, the gradient of log p, has mean zero under p but not under the sampler q. So tokens from q move the
policy even where every advantage is the same. Centering subtracts that mean, which needs q over the
vocabulary. A sampler hands out its K most likely tokens, the head, and the rest, the tail, is modelled; or,
with top-p or top-k sampling, all tokens that it could draw, the support, and nothing is modelled.

A loss multiplies the score of a token by -A g, A its advantage. With REINFORCE g is the weight f; with PPO's
loss it is f times the ratio target / proximal, and 0 where that is clipped.

Source: Marek and Ryabinin 2026, https://arxiv.org/abs/2609.20807, equations 9, 12 and 14, appendix A.3; over
a support: slime, backends/megatron_utils/loss.py, get_score_centering_terms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slime_ext.ops.divergences import wide
from slime_ext.ops.segments import chunks

FLOOR = 1e-6  # of the mass of a tail: with a head that is the whole vocabulary it is 0 but for rounding
CHUNK = 2**20  # candidates that are weighted at once: bounds the memory of what a weight needs
ABSENT = -1e30  # log-prob of what a head lacks, under every policy: probability 0, on-policy


class Candidates(NamedTuple):
    """Tokens that the sampler could have drawn, with log-probs of one shape, nats, without gradient."""

    trainer: Tensor
    sampler: Tensor
    proximal: Tensor
    spread: Callable[[Tensor], Tensor]  # [T] numbers -> for each candidate that of the token it stands at


Weight = Callable[[Candidates], Tensor]  # g of each candidate, finite or infinite


def centering(
    sampler: Tensor,
    trainer: Tensor,
    weight: Weight | None,
    counts: Tensor,
    proximal: Tensor | None = None,
) -> Tensor:
    """C_t: the term that, times the advantage and added to the loss, centers the weighted score.

    With head H, q = e^sampler, p = e^trainer, masses Q and P of the head, and the factor g of a score:

        rho   = (1 - Q) / (1 - P)                      tail masses of at least 1e-6
        alpha = rho g(tail)                            q in the tail is modelled as rho p
        C_t   = sum over v in H of stopgrad(q_v g_v - alpha p_v) log p_v

    Every token stands alone: packing, and how context-parallel ranks split a sequence, change nothing.

    Args:
        sampler: [T, K] log-probs of the sampler's head, normalised over the whole vocabulary at the sampling
            temperature, nats; -inf where a head is shorter.
        trainer: [T, K] log-probs of the same tokens under the trained policy, nats, with grad.
        weight: gives g of [t, K + 1] candidates, the last of which is the tail as one token. Called without
            gradient. None: g = 1.
        counts: [T] bool; where False a head may hold anything.
        proximal: [T, K] as ``trainer`` under the proximal policy; None: the same as ``trainer``.

    Returns:
        [T] nats, with a gradient through ``trainer`` alone; 0 where a token has no head.
    """
    found: Tensor = _Term.apply(sampler, trainer, weight, counts, proximal)  # type: ignore[no-untyped-call]
    return found


def exact_centering(
    sampler: Tensor,
    trainer: Tensor,
    offsets: Tensor,
    weight: Weight | None,
    counts: Tensor,
    proximal: Tensor | None = None,
) -> Tensor:
    """C_t over the support S of the sampler, where nothing is modelled:

        C_t = sum over v in S of stopgrad(q_v g_v) log p_v

    Args:
        sampler: [N] log-probs of every token that the sampler could draw at each of T tokens, one token's
            next to each other, normalised over the support, nats.
        trainer: [N] log-probs of the same tokens under the trained policy, normalised over the support, nats,
            with grad.
        offsets: [T + 1] int64: the candidates of token t are offsets[t] to offsets[t + 1] - 1; there may be
            none.
        weight: as in ``centering``, of [n] candidates.
        counts: [T] bool; where False a support may hold anything.
        proximal: [N] as ``trainer`` under the proximal policy; None: the same as ``trainer``.

    Returns:
        [T] nats, with a gradient through ``trainer`` alone; 0 where a token has no support.

    >>> q, p = torch.tensor([0.7, 0.3]).log(), torch.tensor([0.5, 0.5]).log().requires_grad_()
    >>> c = exact_centering(q, p, torch.tensor([0, 2]), None, torch.tensor([True]))
    >>> torch.autograd.grad(c.sum(), p)[0]  # q
    tensor([0.7000, 0.3000])
    """
    found: Tensor = _ExactTerm.apply(  # type: ignore[no-untyped-call]
        sampler, trainer, offsets, weight, counts, proximal
    )
    return found


def owners(offsets: Tensor, count: int) -> Tensor:
    """[N] int64, the token that each of ``count`` candidates stands at.

    >>> owners(torch.tensor([0, 2, 2, 3]), 3)
    tensor([0, 0, 2])
    """
    return torch.repeat_interleave(offsets.diff(), output_size=count)


def segment_sums(values: Tensor, offsets: Tensor) -> Tensor:
    """[N] of each candidate -> [T] the sum at each token, 0 where there is none."""
    return torch.segment_reduce(values, "sum", offsets=offsets, unsafe=True, initial=0)


class _Term(torch.autograd.Function):
    """Keeps the coefficients, which are its gradient, and nothing else of size [T, K]."""

    @staticmethod
    def forward(
        ctx: Any,
        sampler: Tensor,
        trainer: Tensor,
        weight: Weight | None,
        counts: Tensor,
        proximal: Tensor | None,
    ) -> Tensor:
        dtype = wide(sampler.dtype, trainer.dtype)
        coefficients = torch.empty(sampler.shape, dtype=dtype, device=sampler.device)
        found = coefficients.new_empty(len(sampler))
        absent = torch.where(counts, 0.0, -torch.inf).to(dtype)[:, None]
        for rows in chunks(sampler, CHUNK):
            log_q = (sampler[rows] + absent[rows]).nan_to_num(ABSENT, torch.inf, ABSENT)
            log_p, log_o = (
                None if x is None else torch.where(log_q > ABSENT, x[rows].to(dtype), ABSENT)
                for x in (trainer, proximal)
            )
            assert log_p is not None
            own = coefficients[rows] = _coefficients(log_q, log_p, log_o, weight, rows)
            found[rows] = (own * log_p).sum(1)
        ctx.save_for_backward(coefficients)
        ctx.dtype = trainer.dtype
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        (coefficients,) = ctx.saved_tensors
        return None, (slopes[0][:, None] * coefficients).to(ctx.dtype), None, None, None


def _coefficients(
    log_q: Tensor, log_p: Tensor, log_o: Tensor | None, weight: Weight | None, rows: slice
) -> Tensor:
    """[t, K] q_v g_v - alpha p_v."""
    q, p = log_q.exp(), log_p.exp()
    q_tail, p_tail = _tail(q), _tail(p)
    alpha = q_tail / p_tail
    if weight is not None:
        all_q, all_p = torch.cat([log_q, q_tail.log()], 1), torch.cat([log_p, p_tail.log()], 1)
        all_o = all_p if log_o is None else torch.cat([log_o, _tail(log_o.exp()).log()], 1)
        g = weight(Candidates(all_p, all_q, all_o, lambda x: x[rows, None].expand_as(all_p)))
        g = _finite(g)
        q, alpha = q * g[:, :-1], alpha * g[:, -1:]
    return q - alpha * p


def _tail(probabilities: Tensor) -> Tensor:
    """[t, K] of the head -> [t, 1] of all other tokens."""
    return (1 - probabilities.sum(1, keepdim=True)).clamp_min(FLOOR)


def _finite(g: Tensor) -> Tensor:
    """A sampler's probability may underflow where a weight overflows, and 0 times infinity is NaN."""
    return g.clamp(max=torch.finfo(g.dtype).max)


def _at(owner: Tensor, values: Tensor) -> Tensor:
    return values.index_select(0, owner)


class _ExactTerm(torch.autograd.Function):
    """As ``_Term``, of size [N]."""

    @staticmethod
    def forward(
        ctx: Any,
        sampler: Tensor,
        trainer: Tensor,
        offsets: Tensor,
        weight: Weight | None,
        counts: Tensor,
        proximal: Tensor | None,
    ) -> Tensor:
        dtype = wide(sampler.dtype, trainer.dtype)
        owner = owners(offsets, len(sampler))
        there = counts.index_select(0, owner) & (sampler > -torch.inf)
        log_q, log_p, log_o = (
            None if x is None else torch.where(there, x.to(dtype), ABSENT)
            for x in (sampler, trainer, proximal)
        )
        assert log_q is not None and log_p is not None
        coefficients = log_q.exp()
        if weight is not None:
            log_o = log_p if log_o is None else log_o
            for some in chunks(sampler[:, None], CHUNK):
                spread = functools.partial(_at, owner[some])
                given = Candidates(log_p[some], log_q[some], log_o[some], spread)
                coefficients[some] *= _finite(weight(given))
        ctx.save_for_backward(coefficients, owner)
        ctx.dtype = trainer.dtype
        return segment_sums(coefficients * log_p, offsets)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        coefficients, owner = ctx.saved_tensors
        of_trainer = (slopes[0].index_select(0, owner) * coefficients).to(ctx.dtype)
        return None, of_trainer, None, None, None, None
