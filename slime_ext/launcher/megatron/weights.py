"""Weights of a Qwen3 between Megatron and Hugging Face, for every tensor- and pipeline-parallel layout.

Those of a Qwen2 or a Llama too, for the hosts that run without CUDA.

A Megatron parameter is one or several Hugging Face tensors, interleaved in groups and then cut into equal
parts: ``full = interleave(tensors, groups)``, ``part = full.chunk(tp, dim)[rank]``. Query, key and value are
interleaved per query group, gate and up projection per tensor-parallel rank. Each expert of a mixture is a
parameter pair of its own on both sides (Megatron's SequentialMLP, Hugging Face's files).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from slime_ext.errors import DataError
from slime_ext.launcher.megatron import parallel

GetTensor = Callable[[str], Tensor]


@dataclass(frozen=True)
class Part:
    """Which Hugging Face tensors make up one Megatron parameter.

    Attributes:
        names: Hugging Face names, in the order of interleaving.
        groups: number of groups that they are interleaved in along dimension 0.
        dim: dimension that tensor parallelism cuts, None for a parameter that every rank holds whole.
        rows: size of each tensor along dimension 0, relative to the others; empty for a single one.
    """

    names: tuple[str, ...]
    groups: int = 1
    dim: int | None = None
    rows: tuple[int, ...] = ()

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The whole Megatron tensor."""
        if len(tensors) == 1:
            return tensors[0]
        return torch.cat([t.unflatten(0, (self.groups, -1)) for t in tensors], dim=1).flatten(0, 1)

    def split(self, full: Tensor) -> dict[str, Tensor]:
        """Inverse of ``join``: {Hugging Face name: tensor}."""
        if len(self.names) == 1:
            return {self.names[0]: full}
        grouped = full.unflatten(0, (self.groups, -1))
        parts = grouped.split([r * grouped.size(1) // sum(self.rows) for r in self.rows], dim=1)
        return {name: part.flatten(0, 1) for name, part in zip(self.names, parts, strict=True)}

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """The part of ``full`` that one tensor-parallel rank holds."""
        return full if self.dim is None else full.chunk(size, self.dim)[rank]


# Megatron name inside a layer -> (Hugging Face name, dimension cut by tensor parallelism). Transformer
# Engine's layers hold the two layer norms in the linear layers after them, hence two spellings.
_SINGLE = {
    "input_layernorm.weight": ("input_layernorm.weight", None),
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight", None),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", None),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight", None),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", 1),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", None),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight", None),
    "mlp.router.weight": ("mlp.gate.weight", None),
}
_MLP = re.compile(r"mlp\.(?:experts\.local_experts\.(\d+)\.)?linear_fc([12])\.weight")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def part_of(name: str, hf_config: Any, tp_size: int) -> Part:
    """The Part for a Megatron parameter name with global layer numbers.

    Raises:
        DataError: a parameter that neither a Qwen3 nor a Qwen3-MoE has.
    """
    output = "model.embed_tokens.weight" if hf_config.tie_word_embeddings else "lm_head.weight"
    outside = {
        "embedding.word_embeddings.weight": Part(("model.embed_tokens.weight",), dim=0),
        "output_layer.weight": Part((output,), dim=0),
        "decoder.final_layernorm.weight": Part(("model.norm.weight",)),
    }
    if name in outside:
        return outside[name]
    layer = _LAYER.fullmatch(name)
    part = _layer_part(f"model.layers.{layer[1]}.", layer[2], hf_config, tp_size) if layer else None
    if part is None:
        raise DataError(
            f"weight conversion: expected a parameter of Qwen3, got {name!r}: this model is not supported"
        )
    return part


def _layer_part(prefix: str, name: str, hf_config: Any, tp_size: int) -> Part | None:
    if name in _SINGLE:
        hf_name, dim = _SINGLE[name]
        return Part((prefix + hf_name,), dim=dim)
    if name in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
        heads, groups = hf_config.num_attention_heads, hf_config.num_key_value_heads
        last = name.rpartition(".")[2]
        names = tuple(f"{prefix}self_attn.{kind}_proj.{last}" for kind in "qkv")
        return Part(names, groups=groups, dim=0, rows=(heads // groups, 1, 1))
    if mlp := _MLP.fullmatch(name):
        expert, number = mlp.groups()
        prefix += "mlp." if expert is None else f"mlp.experts.{expert}."
        if number == "2":
            return Part((prefix + "down_proj.weight",), dim=1)
        names = (prefix + "gate_proj.weight", prefix + "up_proj.weight")
        return Part(names, groups=tp_size, dim=0, rows=(1, 1))
    return None


def named_parts(model_chunks: Sequence[nn.Module], hf_config: Any) -> Iterator[tuple[nn.Parameter, Part]]:
    """(parameter, Part) of every parameter of this pipeline stage, in the order of the model."""
    tp_size = parallel.tp_group().size()
    for chunk in model_chunks:
        model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
        for name, parameter in model.named_parameters():
            yield parameter, part_of(_global_name(name, model), hf_config, tp_size)


def _global_name(name: str, model: nn.Module) -> str:
    """``decoder.layers.<place in this stage>.x`` -> ``decoder.layers.<place in the whole model>.x``."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return name
    return f"decoder.layers.{model.decoder.layers[int(layer[1])].layer_number - 1}.{layer[2]}"


@torch.no_grad()
def load_hf_state(model_chunks: Sequence[nn.Module], get_tensor: GetTensor, hf_config: Any) -> None:
    """Fills this rank's parameters from full Hugging Face tensors, asked for by name, each as it is needed.

    Raises:
        DataError: a tensor of another shape than the model's.
    """
    group = parallel.tp_group()
    for parameter, part in named_parts(model_chunks, hf_config):
        tensors = [get_tensor(name) for name in part.names]
        shard = part.shard(part.join(tensors), group.rank(), group.size())
        if shard.shape != parameter.shape:
            raise DataError(
                f"weights: expected {', '.join(part.names)} to give {tuple(parameter.shape)} per rank, "
                f"got {tuple(shard.shape)}: the weights belong to another model configuration"
            )
        parameter.copy_(shard)


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
            state.update(part.split(_whole(parameter.detach(), part, tp)))
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


def read_hf_checkpoint(path: str | Path) -> GetTensor:
    """``get_tensor`` over the safetensors files of a Hugging Face directory.

    Raises:
        DataError: no safetensors file there, or a tensor that none of them holds.
    """
    from safetensors import safe_open

    files = [safe_open(file, framework="pt") for file in sorted(Path(path).glob("*.safetensors"))]
    if not files:
        raise DataError(f"{path}: expected safetensors files, got none: give a Hugging Face directory")
    where = {name: file for file in files for name in file.keys()}

    def get_tensor(name: str) -> Tensor:
        if name not in where:
            raise DataError(
                f"{path}: expected the tensor {name!r}, got none: the checkpoint is of another model"
            )
        return where[name].get_tensor(name)

    return get_tensor
