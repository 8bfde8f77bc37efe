"""Hugging Face weights into Megatron's parameters, for hosts that read them through megatron.bridge alone.

slime v0.2.0 to v0.3.0 and miles (backends/megatron_utils/checkpoint.py, `_load_checkpoint_hf`) need
megatron.bridge, which needs Transformer Engine; slime from v0.3.1 on has a converter of its own
(hf_to_megatron), and keeps it. Reads Qwen3, its mixture of experts, Qwen2 and Llama, for every tensor- and
pipeline-parallel layout.

A Megatron parameter is one or several Hugging Face tensors, interleaved in groups and then cut into equal
parts: ``full = interleave(tensors, groups)``, ``part = full.chunk(tp, dim)[rank]``. Query, key and value are
interleaved per query group, gate and up projection per tensor-parallel rank. An expert is whole on its rank.
"""

from __future__ import annotations

import inspect
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from slime_ext.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter

    GetTensor = Callable[[str], Tensor]

# Megatron name inside a layer -> (Hugging Face name, dimension cut by tensor parallelism). Transformer
# Engine's layers hold the two layer norms in the linear layers after them, hence two spellings.
SINGLE = {
    "input_layernorm.weight": ("input_layernorm.weight", None),
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight", None),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", None),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight", None),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", 1),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", None),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight", None),
    "mlp.router.weight": ("mlp.gate.weight", None),
}
MLP = re.compile(r"mlp\.(experts\.)?linear_fc([12])\.weight(\d+)?")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def replace_loader(checkpoint: ModuleType) -> None:
    """Gives the host's checkpoint module a `_load_checkpoint_hf` that does without megatron.bridge."""
    if "megatron.bridge" not in inspect.getsource(checkpoint._load_checkpoint_hf):
        return

    def _load_checkpoint_hf(
        ddp_model: Sequence[Module], optimizer: object, args: Namespace, load_path: str
    ) -> tuple[int, int]:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(load_path, trust_remote_code=True)
        load_hf_state(ddp_model, read_hf_checkpoint(load_path), config)
        if optimizer is not None:
            optimizer.reload_model_params()
        return 0, 0

    checkpoint._load_checkpoint_hf = _load_checkpoint_hf


@dataclass(frozen=True)
class Part:
    """Which Hugging Face tensors make up one Megatron parameter.

    Attributes:
        names: Hugging Face names, in the order of interleaving.
        groups: number of groups that they are interleaved in along dimension 0.
        dim: dimension that tensor parallelism cuts, None for a parameter that every rank holds whole.
    """

    names: tuple[str, ...]
    groups: int = 1
    dim: int | None = None

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The whole Megatron tensor."""
        if len(tensors) == 1:
            return tensors[0]
        import torch

        return torch.cat([t.unflatten(0, (self.groups, -1)) for t in tensors], dim=1).flatten(0, 1)

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """The part of ``full`` that one tensor-parallel rank holds."""
        return full if self.dim is None else full.chunk(size, self.dim)[rank]


def part_of(name: str, hf_config: Any, tp_size: int) -> Part:
    """The Part for a Megatron parameter name with global layer numbers.

    Raises:
        DataError: a parameter that no supported model has.
    """
    output = "model.embed_tokens.weight" if hf_config.tie_word_embeddings else "lm_head.weight"
    outside = {
        "embedding.word_embeddings.weight": Part(("model.embed_tokens.weight",), dim=0),
        "output_layer.weight": Part((output,), dim=0),
        "decoder.final_layernorm.weight": Part(("model.norm.weight",)),
    }
    if name in outside:
        return outside[name]
    layer = LAYER.fullmatch(name)
    part = _layer_part(f"model.layers.{layer[1]}.", layer[2], hf_config, tp_size) if layer else None
    if part is None:
        raise DataError(
            f"weight conversion: expected a parameter of Qwen3, Qwen2 or Llama, got {name!r}: this model is "
            "not supported"
        )
    return part


def _layer_part(prefix: str, name: str, hf_config: Any, tp_size: int) -> Part | None:
    if name in SINGLE:
        hf_name, dim = SINGLE[name]
        return Part((prefix + hf_name,), dim=dim)
    if name in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
        last = name.rpartition(".")[2]
        names = tuple(f"{prefix}self_attn.{kind}_proj.{last}" for kind in "qkv")
        return Part(names, groups=hf_config.num_key_value_heads, dim=0)
    if mlp := MLP.fullmatch(name):
        is_expert, number, expert = mlp.groups()
        prefix += f"mlp.experts.{expert}." if is_expert else "mlp."
        if number == "2":
            return Part((prefix + "down_proj.weight",), dim=None if is_expert else 1)
        names = (prefix + "gate_proj.weight", prefix + "up_proj.weight")
        return Part(names) if is_expert else Part(names, groups=tp_size, dim=0)
    return None


def named_parts(model_chunks: Sequence[Module], hf_config: Any) -> Iterator[tuple[Parameter, Part]]:
    """(parameter, Part) of every parameter of this pipeline stage, in the order of the model."""
    from megatron.core.parallel_state import get_tensor_model_parallel_world_size
    from megatron.core.utils import get_attr_wrapped_model

    for chunk in model_chunks:
        model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
        for name, parameter in model.named_parameters():
            name = _global_name(name, model)
            yield parameter, part_of(name, hf_config, get_tensor_model_parallel_world_size())


def _global_name(name: str, model: Module) -> str:
    """``decoder.layers.<place in this stage>.x`` -> ``decoder.layers.<place in the whole model>.x``."""
    layer = LAYER.fullmatch(name)
    if layer is None:
        return name
    return f"decoder.layers.{model.decoder.layers[int(layer[1])].layer_number - 1}.{layer[2]}"


def load_hf_state(model_chunks: Sequence[Module], get_tensor: GetTensor, hf_config: Any) -> None:
    """Fills this rank's parameters from full Hugging Face tensors, asked for by name, each as it is needed.

    Raises:
        DataError: a tensor of another shape than the model's.
    """
    import torch
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    group = get_tensor_model_parallel_group()
    for parameter, part in named_parts(model_chunks, hf_config):
        tensors = [get_tensor(name) for name in part.names]
        shard = part.shard(part.join(tensors), group.rank(), group.size())
        if shard.shape != parameter.shape:
            raise DataError(
                f"weights: expected {', '.join(part.names)} to give {tuple(parameter.shape)} per rank, "
                f"got {tuple(shard.shape)}: the weights belong to another model configuration"
            )
        with torch.no_grad():
            parameter.copy_(shard)


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
