"""Megatron's own layers under Transformer Engine's parameter names, for `--spec`, with packed attention.

Stands for the layers of Transformer Engine (megatron/core/extensions/transformer_engine.py), which every
release of slime and miles trains with. Their converters to Hugging Face's format know its names (the norm is
a parameter of the linear layer behind it, linear_qkv.layer_norm_weight), and Megatron's local attention
refuses packed sequences and context parallelism (core/transformer/dot_product_attention.py).

    --spec slime_ext.without_cuda.stand_ins.layers layer_spec --transformer-impl local
"""

from __future__ import annotations

from argparse import Namespace

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from slime_ext.without_cuda.stand_ins.attention import PackedAttention


class NormedColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm(x) W^T, the norm's weight a parameter of the layer, as in Transformer Engine's."""

    def __init__(self, input_size: int, output_size: int, *, config: object, **options: object) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor, *args: object, **options: object) -> tuple[Tensor, Tensor | None]:
        """x [..., input_size] -> [..., output_size / tensor parallel size], and the bias or None."""
        normed = F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps)
        return super().forward(normed, *args, **options)


def layer_spec(args: Namespace, config: object, vp_stage: int | None = None) -> ModuleSpec:
    """The specification of a decoder layer, as the hosts call the function that --spec names."""
    spec = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization="RMSNorm")
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
    layer.sharded_state_dict_keys_map = {}  # the parameters have the names of checkpoints
    layer.self_attention.submodules.core_attention = PackedAttention
    layer.self_attention.submodules.linear_qkv = NormedColumnParallelLinear
    layer.mlp.submodules.linear_fc1 = NormedColumnParallelLinear
    return spec
