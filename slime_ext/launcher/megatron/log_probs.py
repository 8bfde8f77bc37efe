"""Per-token log-probs and entropy from logits whose vocabulary is split over the tensor-parallel ranks.

Shapes: T packed local tokens, V vocabulary, n tensor-parallel ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


def vocab_parallel_log_probs(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, group: dist.ProcessGroup | None = None
) -> Tensor:
    """log p(target) = x[target] - log sum_v exp(x[v]), x = logits / temperature.

    Args:
        logits: [T, V / n]; never written to. Half precision is computed in float32, all else in its own.
        targets: [T] global token ids.
        temperature: the one that the tokens were sampled with.
        group: tensor-parallel group, Megatron's by default.

    Returns:
        [T], the same on every rank of the group; its gradient reaches each rank's part of the logits.
    """
    return _LogProbs.apply(logits, targets, temperature, _group(group), False)[0]


def log_probs_and_entropy(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """The above, and the entropy H = -sum_v p[v] log p[v] of p = softmax(logits / temperature), [T] each.

    From one pass over the logits and one saved copy of the probabilities.
    """
    return _LogProbs.apply(logits, targets, temperature, _group(group), True)


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    return parallel_state.get_tensor_model_parallel_group() if group is None else group


class _LogProbs(torch.autograd.Function):
    """(log p[target], H), with d log p[t]/dx[v] = 1[v = t] - p[v] and dH/dx[v] = -p[v] (log p[v] + H).

    Saves the probabilities only. Without entropy the second output is zero and costs nothing.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        group: dist.ProcessGroup,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        shifted = logits.to(dtype) / temperature  # a copy of our own: the steps below write to it
        top = shifted.amax(-1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        shifted -= top[:, None]
        column, owned = _local_column(targets, shifted.size(-1), group)
        chosen = torch.where(owned, shifted.gather(-1, column[:, None])[:, 0], 0)
        weighted = (shifted.exp() * shifted).sum(-1) if with_entropy else torch.zeros_like(top)
        probs = shifted.exp_()
        sums = torch.stack([probs.sum(-1), chosen, weighted])
        dist.all_reduce(sums, group=group)
        total, chosen, weighted = sums
        probs /= total[:, None]
        log_total = total.log()
        entropy = log_total - weighted / total if with_entropy else weighted
        ctx.save_for_backward(probs, column, owned, entropy)
        ctx.temperature, ctx.logits_dtype, ctx.with_entropy = temperature, logits.dtype, with_entropy
        return chosen - log_total, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_log_prob: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        probs, column, owned, entropy = ctx.saved_tensors
        grad = probs * -grad_log_prob[:, None]
        if ctx.with_entropy:
            grad -= grad_entropy[:, None] * (torch.xlogy(probs, probs) + probs * entropy[:, None])
        grad.scatter_add_(-1, column[:, None], torch.where(owned, grad_log_prob, 0)[:, None])
        return (grad / ctx.temperature).to(ctx.logits_dtype), None, None, None, None


def _local_column(targets: Tensor, width: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Each target's column in this rank's part of the vocabulary, and whether it lies there."""
    column = targets - group.rank() * width
    owned = (column >= 0) & (column < width)
    return column.clamp(0, width - 1), owned
