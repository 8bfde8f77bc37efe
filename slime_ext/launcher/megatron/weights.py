"""Weights of a Megatron model back to Hugging Face's, for every tensor- and pipeline-parallel layout.

The way there is without_cuda/stand_ins/hf_weights.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slime_ext.launcher.megatron import parallel
from slime_ext.without_cuda.stand_ins.hf_weights import Part, load_hf_state, named_parts, read_hf_checkpoint

__all__ = ["GetTensor", "gather_hf_state", "load_hf_state", "read_hf_checkpoint"]
GetTensor = Callable[[str], Tensor]


def split(part: Part, full: Tensor, hf_config: Any) -> dict[str, Tensor]:
    """Inverse of ``part.join``: {Hugging Face name: tensor}."""
    if len(part.names) == 1:
        return {part.names[0]: full}
    heads, groups = hf_config.num_attention_heads, hf_config.num_key_value_heads
    rows = (heads // groups, 1, 1) if len(part.names) == 3 else (1, 1)
    grouped = full.unflatten(0, (part.groups, -1))
    parts = grouped.split([r * grouped.size(1) // sum(rows) for r in rows], dim=1)
    return {name: one.flatten(0, 1) for name, one in zip(part.names, parts, strict=True)}


@torch.no_grad()
def gather_hf_state(model_chunks: Sequence[nn.Module], hf_config: Any) -> dict[str, Tensor] | None:
    """The full Hugging Face state dict on the CPU of global rank 0; None on every other rank.

    Only the ranks of the first model copy (data- and context-parallel rank 0) talk to each other; the others
    return at once. A tied output layer is left out, as Hugging Face leaves it out.
    """
    if parallel.dp_group(with_context_parallel=True).rank() != 0:
        return None
    tp, pp = parallel.tp_group(), parallel.pp_group()
    state: dict[str, Tensor] = {}
    for parameter, part in named_parts(model_chunks, hf_config):
        if not getattr(parameter, "shared", False):  # the last stage's copy of a tied embedding
            state.update(split(part, _whole(parameter.detach(), part, tp), hf_config))
    if tp.rank() != 0:
        return None
    state = {name: tensor.cpu().clone() for name, tensor in state.items()}
    if pp.size() == 1:
        return state
    stages: list[Any] | None = [None] * pp.size() if pp.rank() == 0 else None
    dist.gather_object(state, stages, dst=dist.get_global_rank(pp, 0), group=pp)
    return None if stages is None else {name: t for stage in stages for name, t in stage.items()}


def _whole(local: Tensor, part: Part, group: dist.ProcessGroup) -> Tensor:
    """A parameter from the shards of all tensor-parallel ranks."""
    if part.dim is None or group.size() == 1:
        return local
    shards = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(shards, local.contiguous(), group=group)
    return torch.cat(shards, dim=part.dim)
