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
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from slime_ext.launcher.megatron.attention import PackedAttention


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
    norm = WrappedTorchNorm if args.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=NormedColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )
    mlp = MLPSubmodules(linear_fc1=NormedColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            mlp=ModuleSpec(MLP, submodules=mlp),
            mlp_bda=get_bias_dropout_add,
        ),
    )
