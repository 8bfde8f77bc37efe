"""One pipeline stage of a Qwen3-shaped GPT on megatron-core, with weights that do not depend on the layout.

RMSNorm, SwiGLU, RoPE, grouped-query attention, query and key norm, no bias, tied or untied embeddings, one
MLP or a mixture of experts (without load-balancing loss) in a layer; Megatron's local layers with our packed
attention, or Transformer Engine's on CUDA where it is installed.
"""

from __future__ import annotations

import argparse
import math
import zlib
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    HAVE_TE,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import AutoModelForCausalLM

from slime_ext.launcher.megatron import parallel
from slime_ext.launcher.megatron.weights import GetTensor, load_hf_state
from slime_ext.without_cuda.stand_ins.attention import PackedAttention


def build_model(
    args: argparse.Namespace, hf_config: Any, get_tensor: GetTensor | None = None
) -> list[DistributedDataParallel]:
    """This rank's model chunks (one), wrapped in Megatron's DistributedDataParallel, with their weights.

    Args:
        args: the layout's sizes, ``seed``, ``params_dtype``, ``init_method_std``, ``transformer_impl``.
        hf_config: a Hugging Face Qwen3 or Qwen3-MoE configuration.
        get_tensor: full Hugging Face tensors by name; None draws them from ``args.seed``.
    """
    config = transformer_config(args, hf_config)
    model = GPTModel(
        config,
        _layer_spec(args, config.num_moe_experts),
        vocab_size=hf_config.vocab_size,
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=parallel.is_first_stage(),
        post_process=parallel.is_last_stage(),
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=hf_config.rope_parameters["rope_theta"],
    )
    # torch's RMSNorm ignores params_dtype
    model = model.to(device=parallel.device(), dtype=config.params_dtype)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.params_dtype.itemsize < 4,
        use_distributed_optimizer=torch.cuda.is_available(),
    )
    chunks = [DistributedDataParallel(config, ddp_config, model)]
    load_hf_state(chunks, get_tensor or random_weights(args, hf_config), hf_config)
    return chunks


def params_dtype(args: argparse.Namespace) -> torch.dtype:
    """The type of the weights: --bf16, --fp16 and --params-dtype, resolved."""
    dtype = args.params_dtype
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)


def transformer_config(args: argparse.Namespace, hf_config: Any) -> TransformerConfig:
    """Megatron's configuration of the same model, for this layout and machine."""
    cuda, dtype = torch.cuda.is_available(), params_dtype(args)
    pp = args.pipeline_model_parallel_size
    config = TransformerConfig(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        ffn_hidden_size=hf_config.intermediate_size,
        num_attention_heads=hf_config.num_attention_heads,
        num_query_groups=hf_config.num_key_value_heads,
        kv_channels=hf_config.head_dim,
        layernorm_epsilon=hf_config.rms_norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=pp,
        context_parallel_size=args.context_parallel_size,
        calculate_per_token_loss=args.calculate_per_token_loss,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        use_cpu_initialization=not cuda,
        # The fused forms go through torch.compile, which wants a C++ compiler on a CPU.
        bias_activation_fusion=cuda,
        bias_dropout_fusion=cuda,
        batch_p2p_sync=cuda,
        **_experts(hf_config),
    )
    # Packed micro-batches differ in length. Megatron's check refuses that for the dispatcher that gathers
    # over the ranks that share a layer's experts; here that is one rank.
    config.variable_seq_lengths = pp > 1
    config.finalize_model_grads_func = finalize_model_grads
    return config


def _experts(hf_config: Any) -> dict[str, Any]:
    """Megatron's fields of a mixture of experts; none for a dense model."""
    if hf_config.model_type != "qwen3_moe":
        return {}
    return {
        "num_moe_experts": hf_config.num_experts,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_router_pre_softmax": not hf_config.norm_topk_prob,  # else the softmax is over the chosen ones
        "moe_router_load_balancing_type": "none",
    }


def _layer_spec(args: argparse.Namespace, experts: int | None) -> ModuleSpec:
    """Transformer Engine's layers on CUDA where it is installed, unless ``transformer_impl`` is "local"."""
    if HAVE_TE and torch.cuda.is_available() and args.transformer_impl != "local":
        return get_gpt_layer_with_transformer_engine_spec(experts, qk_layernorm=True)
    spec = get_gpt_layer_local_spec(experts, qk_layernorm=True, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    return spec


def random_weights(args: argparse.Namespace, hf_config: Any) -> GetTensor:
    """Initial Hugging Face tensors, each drawn from a seed made of ``args.seed`` and its name.

    Normal with std ``args.init_method_std``, the projections into the residual stream divided by
    sqrt(2 * layers) as Megatron does; norms are 1. Any layout that asks for a name gets the same numbers.
    """
    std = args.init_method_std
    scaled = std / math.sqrt(2 * hf_config.num_hidden_layers)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(hf_config)
    shapes = {name: p.shape for name, p in whole.named_parameters(remove_duplicate=False)}

    def get_tensor(name: str) -> Tensor:
        shape = shapes[name] if name in shapes else _expert_shape(name, hf_config)
        if len(shape) == 1:
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{args.seed}:{name}".encode()))
        return torch.randn(shape, generator=generator) * (scaled if name.endswith(_RESIDUAL) else std)

    return get_tensor


def _expert_shape(name: str, hf_config: Any) -> tuple[int, int]:
    """[out, in] of one expert's matrix; transformers' own parameters are those of all experts in one."""
    sizes = hf_config.moe_intermediate_size, hf_config.hidden_size
    return sizes[::-1] if name.endswith("down_proj.weight") else sizes


_RESIDUAL = ("o_proj.weight", "down_proj.weight")
