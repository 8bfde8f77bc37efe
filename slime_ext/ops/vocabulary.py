"""Log-probs of chosen tokens from logits that ranks share, each holding a part of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slime_ext.ops.centering import owners, segment_sums
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
        held, at = _columns(at, logits.shape[1])
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


def log_probs_within(
    logits: Tensor,
    ids: Tensor,
    rows: Tensor,
    offsets: Tensor,
    *,
    temperature: float = 1.0,
    offset: int = 0,
    all_sum: AllSum = identity,
) -> Tensor:
    """log softmax over a few tokens of the vocabulary, S, others at each of T tokens: one SUM over the ranks.

        log p^S_v = logit_v / temperature - log sum over u in S of e^(logit_u / temperature)

    The rest of the vocabulary is neither read nor given a gradient.

    Args:
        logits: [rows, V / parts] this rank's part of the vocabulary, with grad.
        ids: [N] token ids, distinct at one token, the same on every rank; each is held by one rank.
        rows: [N] int64, which row of the logits each id belongs to.
        offsets: [T + 1] int64: S of token t are ids offsets[t] to offsets[t + 1] - 1; there may be none.
        temperature: of the sampling, > 0; divides in float32 or more.
        offset: the id of this rank's first token.
        all_sum: SUM over the ranks that share the vocabulary; it may work in place.

    Returns:
        [N] nats, the same on every rank, in float32 or more. The gradient is as that of ``log_probs_at``.

    >>> logits = torch.tensor([[0.0, 0.0, 9.0]])
    >>> log_probs_within(logits, torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([0, 2])).exp()
    tensor([0.5000, 0.5000])
    """
    found: Tensor = _LogProbsWithin.apply(  # type: ignore[no-untyped-call]
        logits, ids.long() - offset, rows, offsets, temperature, all_sum
    )
    return found


def _columns(at: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Which ids this rank holds, and the column of each; of the others one that must not be read."""
    return (at >= 0) & (at < width), at.clamp(0, width - 1)


class _LogProbsWithin(torch.autograd.Function):
    """Beside the gradient of the logits the memory is [N]."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        at: Tensor,
        rows: Tensor,
        offsets: Tensor,
        temperature: float,
        all_sum: AllSum,
    ) -> Tensor:
        held, at = _columns(at, logits.shape[1])
        chosen = logits[rows, at].to(wide(logits.dtype)) / temperature
        chosen = all_sum(torch.where(held, chosen, 0))
        owner = owners(offsets, len(at))
        most = torch.segment_reduce(chosen, "max", offsets=offsets, unsafe=True, initial=-torch.inf)
        # The largest term of each sum is 1; -inf, of a token without ids, belongs to no candidate.
        chosen = chosen - most.index_select(0, owner)
        found = chosen - segment_sums(chosen.exp(), offsets).log().index_select(0, owner)
        ctx.temperature = temperature
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        ctx.save_for_backward(found, at, held, rows, offsets, owner)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        """As in ``_LogProbsAt``, each rank's logits get their part of the gradient once."""
        found, at, held, rows, offsets, owner = ctx.saved_tensors
        slope = slopes[0].to(found.dtype)
        slope = slope - found.exp() * segment_sums(slope, offsets).index_select(0, owner)
        gradient = found.new_zeros(ctx.shape, dtype=ctx.dtype)
        values = torch.where(held, slope / ctx.temperature, 0).to(gradient.dtype)
        # Ids that other ranks hold add 0 to the first or the last of this rank's.
        gradient.index_put_((rows, at), values, accumulate=True)
        return gradient, None, None, None, None, None
