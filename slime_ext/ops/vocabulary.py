"""Computes log-probs of chosen tokens from logits that are split over ranks.

Each rank holds a part of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slime_ext.ops.centering import owners, segment_sums
from slime_ext.ops.divergences import wide
from slime_ext.ops.segments import AllSum, chunks, identity

AT_ONCE = 2**24  # number of logits that are converted to float32 at once, to limit the memory


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
    """Computes the log softmax over the whole vocabulary, at the given tokens.

        log p_v = logit_v / temperature - log sum over u of e^(logit_u / temperature)

    It needs one SUM over the ranks.

    Args:
        logits: [T, V / parts] this rank's part of the vocabulary, with grad.
        ids: [T, K] token ids, the same on every rank. An id that no rank holds (padding) gets the logit 0.
        temperature: the sampling temperature, > 0; the division is in float32 or wider.
        offset: the id of this rank's first token.
        part: this rank's number among the ``parts`` ranks.
        all_sum: SUM over the ranks that share the vocabulary; it may work in place.

    Returns:
        [T, K] nats, the same on every rank, in float32 or wider. The backward pass gives this rank's logits
        their gradient. It adds nothing up over ranks, because every rank computes the same loss.
    """
    log_probs: Tensor = _LogProbsAt.apply(  # type: ignore[no-untyped-call]
        logits, ids.long() - offset, temperature, part, parts, all_sum
    )
    return log_probs


class _LogProbsAt(torch.autograd.Function):
    """Computes ``log_probs_at`` and its gradient, a few rows at a time.

    It keeps no row in float32 for the backward pass. Besides the gradient of the logits it needs memory of
    size [T, K].
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, at: Tensor, temperature: float, part: int, parts: int, all_sum: AllSum
    ) -> Tensor:
        held, at = _columns(at, logits.shape[1])
        # Each rank writes the log sum exp of its part to its own slot, so ranks need not exchange maxima.
        dtype = wide(logits.dtype)
        table = torch.zeros(len(at), parts + at.shape[1], dtype=dtype, device=logits.device)
        for rows in chunks(logits, AT_ONCE):
            some = logits[rows].to(dtype, copy=True).div_(temperature)
            table[rows, parts:] = torch.where(held[rows], some.gather(1, at[rows]), 0)
            # The maximum is subtracted first, because exp would overflow. If all logits of a row are -inf,
            # the lowest finite number is subtracted instead, because -inf - -inf is NaN.
            most = some.amax(1, keepdim=True).clamp_min(torch.finfo(some.dtype).min)
            table[rows, part] = most[:, 0] + some.sub_(most).exp_().sum(1).log()
            del some  # frees its memory before the next rows are converted
        table = all_sum(table)
        total = table[:, :parts].logsumexp(1, keepdim=True)
        ctx.temperature = temperature
        ctx.save_for_backward(logits, at, held, total)
        return table[:, parts:] - total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradient of this rank's logits.

        Ranks add nothing up, because every rank computes the same loss.
        """
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
    """Computes the log softmax over a set S of tokens, one set per position.

        log p^S_v = logit_v / temperature - log sum over u in S of e^(logit_u / temperature)

    It needs one SUM over the ranks. The rest of the vocabulary is not read and gets no gradient.

    Args:
        logits: [rows, V / parts] this rank's part of the vocabulary, with grad.
        ids: [N] token ids, the same on every rank and distinct within a position. One rank holds each id.
        rows: [N] int64, the row of the logits that each id belongs to.
        offsets: [T + 1] int64: position t has the ids offsets[t] to offsets[t + 1] - 1; there may be none.
        temperature: the sampling temperature, > 0; the division is in float32 or wider.
        offset: the id of this rank's first token.
        all_sum: SUM over the ranks that share the vocabulary; it may work in place.

    Returns:
        [N] nats, the same on every rank, in float32 or wider, with a gradient as in ``log_probs_at``.

    >>> logits = torch.tensor([[0.0, 0.0, 9.0]])
    >>> log_probs_within(logits, torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([0, 2])).exp()
    tensor([0.5000, 0.5000])
    """
    log_probs: Tensor = _LogProbsWithin.apply(  # type: ignore[no-untyped-call]
        logits, ids.long() - offset, rows, offsets, temperature, all_sum
    )
    return log_probs


def _columns(at: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Finds which ids this rank holds, and the column of each id.

    The column of an id that another rank holds must not be read.
    """
    return (at >= 0) & (at < width), at.clamp(0, width - 1)


class _LogProbsWithin(torch.autograd.Function):
    """Computes ``log_probs_within`` and its gradient.

    Besides the gradient of the logits it needs memory of size [N].
    """

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
        # The largest term of each sum is now 1. The -inf of a position without ids is never selected.
        chosen = chosen - most.index_select(0, owner)
        log_probs = chosen - segment_sums(chosen.exp(), offsets).log().index_select(0, owner)
        ctx.temperature = temperature
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        ctx.save_for_backward(log_probs, at, held, rows, offsets, owner)
        return log_probs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradient of this rank's logits, as ``_LogProbsAt.backward`` does."""
        log_probs, at, held, rows, offsets, owner = ctx.saved_tensors
        slope = slopes[0].to(log_probs.dtype)
        slope = slope - log_probs.exp() * segment_sums(slope, offsets).index_select(0, owner)
        gradient = log_probs.new_zeros(ctx.shape, dtype=ctx.dtype)
        values = torch.where(held, slope / ctx.temperature, 0).to(gradient.dtype)
        # An id that another rank holds adds 0 to this rank's first or last column.
        gradient.index_put_((rows, at), values, accumulate=True)
        return gradient, None, None, None, None, None
