"""Per-token log-probs and entropy from logits whose vocabulary is split over the tensor-parallel ranks.

Shapes: T packed local tokens, V vocabulary, n tensor-parallel ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor


def log_probs_and_entropy(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """log p(target) = x[target] - log Z and H = log Z - sum_v p[v] x[v].

    x = logits / temperature, Z = sum_v exp(x[v]), p = exp(x) / Z.

    Args:
        logits: [T, V / n]; never written to. Half precision is computed in float32, all else in its own.
        targets: [T] global token ids.
        temperature: the one that the tokens were sampled with.

    Returns:
        [T] and [T], the same on every rank of the group; their gradient reaches each rank's part of the
        logits.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    x = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    top = x.detach().amax(-1)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    x = x - top[:, None]
    column = targets - group.rank() * x.size(-1)
    owned = (column >= 0) & (column < x.size(-1))
    chosen = x.gather(-1, column.clamp(0, x.size(-1) - 1)[:, None])[:, 0]
    exp = x.exp()
    local = torch.stack([exp.sum(-1), (exp * x).sum(-1), torch.where(owned, chosen, 0)])
    # Sums over the vocabulary; the gradient of each goes to every rank as it is.
    z, weighted, chosen = reduce_from_tensor_model_parallel_region(local)
    return chosen - z.log(), z.log() - weighted / z
