"""Builds decoder layers for `--spec` from Megatron's own layers, with Transformer Engine's parameter names.

Every release of slime and miles trains with the layers of Transformer Engine
(megatron/core/extensions/transformer_engine.py). Megatron's local layers cannot replace them as they are, for
two reasons. The hosts' converters to Hugging Face's format expect Transformer Engine's names: a norm is a
parameter of the linear layer after it, linear_qkv.layer_norm_weight. And Megatron's local attention refuses
packed sequences and context parallelism (core/transformer/dot_product_attention.py). A layer with a mixture
of experts is Megatron's TEGroupedMLP (core/transformer/moe/experts.py) over ``GroupedLinear``.

    --spec slime_ext_cpu.stand_ins.layers layer_spec --transformer-impl local
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from slime_ext.errors import ConfigError
from slime_ext_cpu.stand_ins.attention import PackedAttention


class NormedColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm(x) W^T. As in Transformer Engine, the norm's weight is a parameter of this layer."""

    def __init__(self, input_size: int, output_size: int, *, config: object, **options: object) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor, *args: object, **options: object) -> tuple[Tensor, Tensor | None]:
        """Maps x [..., input_size] to [..., output_size / tensor parallel size] and the bias or None."""
        normed = F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps)
        return super().forward(normed, *args, **options)


class GroupedLinear(torch.nn.Module):
    """x W_i^T over the rows of expert i. As in Transformer Engine, each W_i is a separate parameter.

    Raises:
        ConfigError: the experts have a bias, or several ranks share them.
    """

    def __init__(
        self,
        experts: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], object],
        bias: bool,
        pg_collection: Any,
        **options: object,
    ) -> None:
        super().__init__()
        shared = max(pg_collection.ep.size(), pg_collection.expt_tp.size())
        if bias or shared > 1:
            raise ConfigError(
                "--num-experts: expected experts without a bias, whole on each rank, got "
                f"{'a bias' if bias else f'{shared} ranks that share them'}: without CUDA leave out "
                "--expert-model-parallel-size, --expert-tensor-parallel-size, --tensor-model-parallel-size"
            )
        self.experts = experts
        for i in range(experts):
            weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            init_method(weight)
            self.register_parameter(f"weight{i}", weight)

    def forward(self, x: Tensor, rows: Sequence[int]) -> tuple[Tensor, None]:
        """Maps x [sum of rows, input_size] to [sum of rows, output_size], and None for the bias.

        The rows of x are sorted by expert.
        """
        parts = x.split(list(rows))
        return torch.cat([F.linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(parts)]), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Returns each expert as a shard of one tensor over all experts. Checkpoints have this form."""
        shards = {}
        for i in range(self.experts):
            place = (*sharded_offsets, (len(sharded_offsets), i, self.experts))
            weight = {"weight": getattr(self, f"weight{i}")}
            shards[f"{prefix}weight{i}"] = make_sharded_tensors_for_checkpoint(weight, prefix, {}, place)[
                f"{prefix}weight"
            ]
        return shards


def layer_spec(args: Namespace, config: Any, vp_stage: int | None = None) -> ModuleSpec:
    """Returns the specification of a decoder layer. The hosts call the function that --spec names."""
    spec = get_gpt_layer_local_spec(
        config.num_moe_experts, qk_layernorm=args.qk_layernorm, normalization="RMSNorm"
    )
    layer = spec.submodules
    layer.input_layernorm = IdentityOp
    layer.sharded_state_dict_keys_map = {}  # the parameters already have the names that checkpoints use
    layer.self_attention.submodules.core_attention = PackedAttention
    layer.self_attention.submodules.linear_qkv = NormedColumnParallelLinear
    if config.num_moe_experts is None:
        layer.pre_mlp_layernorm = IdentityOp
        layer.mlp.submodules.linear_fc1 = NormedColumnParallelLinear
    else:
        linear = MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
        layer.mlp.submodules.experts = ModuleSpec(module=TEGroupedMLP, submodules=linear)
        moe_utils.te_general_gemm = None  # the router reads it, but it exists only with Transformer Engine
    return spec
