"""Score centering: subtracts the sampler's mean of the weighted score.

The score, the gradient of log p, has mean zero under p but not under the sampler q. So tokens from q move the
policy even where every advantage is the same. Centering subtracts that mean, which needs q over the
vocabulary. The sampler may report its K most likely tokens (the head); all other tokens (the tail) are then
modelled. With top-p or top-k sampling it may report every token that it could draw (the support); nothing is
then modelled.

The gradient of a token's loss is -A g times its score, where A is the token's advantage. With REINFORCE, g is
the weight f. With PPO's loss, g is f times the ratio target / proximal, and 0 where that ratio is clipped.

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

FLOOR = 1e-6  # smallest mass of a tail, because a head of the whole vocabulary leaves only rounding error
CHUNK = 2**20  # number of candidates whose weights are computed at once, to limit the memory
ABSENT = -1e30  # log-prob of a missing candidate under every policy: probability 0, ratio 1


class Candidates(NamedTuple):
    """Tokens that the sampler could have drawn, with their log-probs in nats.

    The three tensors have the same shape and no gradient.
    """

    trainer: Tensor
    sampler: Tensor
    proximal: Tensor
    spread: Callable[[Tensor], Tensor]  # spreads [T] numbers: each candidate gets that of its position


Weight = Callable[[Candidates], Tensor]  # computes g of each candidate, which may be infinite


def centering(
    sampler: Tensor,
    trainer: Tensor,
    weight: Weight | None,
    counts: Tensor,
    proximal: Tensor | None = None,
) -> Tensor:
    """Computes C_t of heads. The term A_t C_t in the loss centers the weighted score.

    With head H, q = e^sampler, p = e^trainer, Q and P their sums over the head, and the factor g of a score:

        rho   = (1 - Q) / (1 - P)                      tail masses of at least 1e-6
        alpha = rho g(tail)                            q in the tail is modelled as rho p
        C_t   = sum over v in H of stopgrad(q_v g_v - alpha p_v) log p_v

    The C_t of a token depends on no other token. So it does not change with the packing, nor with how
    context-parallel ranks split a sequence.

    Args:
        sampler: [T, K] log-probs of the sampler's head, normalised over the whole vocabulary at the sampling
            temperature, nats; -inf where a head is shorter.
        trainer: [T, K] log-probs of the same tokens under the trained policy, nats, with grad.
        weight: computes g of [t, K + 1] candidates. The last one is the whole tail, treated as one token.
            It is called without gradient. None: g = 1.
        counts: [T] bool, the tokens that count. Where False, C_t is 0 and the head may hold anything.
        proximal: [T, K] log-probs of the same tokens under the proximal policy, nats; None: the same as
            ``trainer``.

    Returns:
        [T] nats, with a gradient through ``trainer`` alone; 0 where a token has no head.
    """
    term: Tensor = _Term.apply(sampler, trainer, weight, counts, proximal)  # type: ignore[no-untyped-call]
    return term


def exact_centering(
    sampler: Tensor,
    trainer: Tensor,
    offsets: Tensor,
    weight: Weight | None,
    counts: Tensor,
    proximal: Tensor | None = None,
) -> Tensor:
    """Computes C_t over the support S of the sampler, where nothing is modelled.

        C_t = sum over v in S of stopgrad(q_v g_v) log p_v

    Args:
        sampler: [N] log-probs of every token that the sampler could draw, normalised over the support, nats.
            The candidates of one position are next to each other.
        trainer: [N] log-probs of the same tokens under the trained policy, normalised over the support, nats,
            with grad.
        offsets: [T + 1] int64: the candidates of position t are offsets[t] to offsets[t + 1] - 1; there may
            be none.
        weight: as in ``centering``, of [n] candidates.
        counts: [T] bool, the tokens that count. Where False, C_t is 0 and the support may hold anything.
        proximal: [N] log-probs of the same tokens under the proximal policy, nats; None: the same as
            ``trainer``.

    Returns:
        [T] nats, with a gradient through ``trainer`` alone; 0 where a token has no support.

    >>> q, p = torch.tensor([0.7, 0.3]).log(), torch.tensor([0.5, 0.5]).log().requires_grad_()
    >>> c = exact_centering(q, p, torch.tensor([0, 2]), None, torch.tensor([True]))
    >>> torch.autograd.grad(c.sum(), p)[0]  # q
    tensor([0.7000, 0.3000])
    """
    term: Tensor = _ExactTerm.apply(  # type: ignore[no-untyped-call]
        sampler, trainer, offsets, weight, counts, proximal
    )
    return term


def owners(offsets: Tensor, count: int) -> Tensor:
    """Returns the position of each of ``count`` candidates: [N] int64.

    >>> owners(torch.tensor([0, 2, 2, 3]), 3)
    tensor([0, 0, 2])
    """
    return torch.repeat_interleave(offsets.diff(), output_size=count)


def segment_sums(values: Tensor, offsets: Tensor) -> Tensor:
    """Adds up the candidates' numbers at each position: [N] -> [T].

    A position without candidates gets 0.
    """
    return torch.segment_reduce(values, "sum", offsets=offsets, unsafe=True, initial=0)


class _Term(torch.autograd.Function):
    """Computes ``centering`` and its gradient.

    Of size [T, K] it keeps only the coefficients for the backward pass: they are the gradient.
    """

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
        term = coefficients.new_empty(len(sampler))
        absent = torch.where(counts, 0.0, -torch.inf).to(dtype)[:, None]
        for rows in chunks(sampler, CHUNK):
            log_q = (sampler[rows] + absent[rows]).nan_to_num(ABSENT, torch.inf, ABSENT)
            log_p, log_o = (
                None if x is None else torch.where(log_q > ABSENT, x[rows].to(dtype), ABSENT)
                for x in (trainer, proximal)
            )
            assert log_p is not None
            of_rows = coefficients[rows] = _coefficients(log_q, log_p, log_o, weight, rows)
            term[rows] = (of_rows * log_p).sum(1)
        ctx.save_for_backward(coefficients)
        ctx.dtype = trainer.dtype
        return term

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        (coefficients,) = ctx.saved_tensors
        return None, (slopes[0][:, None] * coefficients).to(ctx.dtype), None, None, None


def _coefficients(
    log_q: Tensor, log_p: Tensor, log_o: Tensor | None, weight: Weight | None, rows: slice
) -> Tensor:
    """Computes q_v g_v - alpha p_v: [t, K]."""
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
    """Computes the mass of the tail from the head's probabilities: [t, K] -> [t, 1]."""
    return (1 - probabilities.sum(1, keepdim=True)).clamp_min(FLOOR)


def _finite(g: Tensor) -> Tensor:
    """Caps g at the largest number of its dtype.

    Where a weight overflows, the sampler's probability may underflow, and 0 times infinity is NaN.
    """
    return g.clamp(max=torch.finfo(g.dtype).max)


def _at(owner: Tensor, values: Tensor) -> Tensor:
    return values.index_select(0, owner)


class _ExactTerm(torch.autograd.Function):
    """Computes ``exact_centering`` and its gradient, with memory of size [N]."""

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
                candidates = Candidates(log_p[some], log_q[some], log_o[some], spread)
                coefficients[some] *= _finite(weight(candidates))
        ctx.save_for_backward(coefficients, owner)
        ctx.dtype = trainer.dtype
        return segment_sums(coefficients * log_p, offsets)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        coefficients, owner = ctx.saved_tensors
        of_trainer = (slopes[0].index_select(0, owner) * coefficients).to(ctx.dtype)
        return None, of_trainer, None, None, None, None
