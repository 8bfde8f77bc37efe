"""One pipeline stage of a Qwen3-shaped GPT on megatron-core, with weights that do not depend on the layout.

RMSNorm, SwiGLU, RoPE, grouped-query attention, query and key norm, no bias, tied or untied embeddings;
Megatron's local layers with our packed attention, or Transformer Engine's on CUDA where it is installed.
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
from torch import Tensor, nn

from slime_ext.errors import ConfigError
from slime_ext.launcher.megatron import parallel
from slime_ext.launcher.megatron.attention import PackedAttention
from slime_ext.launcher.megatron.weights import GetTensor, load_hf_state


def build_model(
    args: argparse.Namespace, hf_config: Any, get_tensor: GetTensor | None = None
) -> list[DistributedDataParallel]:
    """This rank's model chunks (one), wrapped in Megatron's DistributedDataParallel, with their weights.

    Args:
        args: sizes of the layout, ``seed``, ``bf16`` / ``fp16`` / ``params_dtype``, ``init_method_std``.
        hf_config: a Hugging Face Qwen3 configuration.
        get_tensor: full Hugging Face tensors by name; None draws them from ``args.seed``.

    Raises:
        ConfigError: a configuration or layout that cannot work here.
    """
    check_model(args, hf_config)
    config = transformer_config(args, hf_config)
    model = GPTModel(
        config,
        _layer_spec(args),
        vocab_size=hf_config.vocab_size,
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=parallel.is_first_stage(),
        post_process=parallel.is_last_stage(),
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=rope_theta(hf_config),
    )
    model = model.to(
        device=parallel.device(), dtype=config.params_dtype
    )  # torch's RMSNorm ignores params_dtype
    chunks = [DistributedDataParallel(config, _ddp_config(args), model)]
    load_hf_state(chunks, get_tensor or random_weights(args, hf_config), hf_config)
    return chunks


def params_dtype(args: argparse.Namespace) -> torch.dtype:
    """bfloat16 or float16 where ``--bf16`` or ``--fp16`` says so, else ``--params-dtype``, else float32."""
    if getattr(args, "bf16", False):
        return torch.bfloat16
    if getattr(args, "fp16", False):
        return torch.float16
    explicit = getattr(args, "params_dtype", None) or torch.float32
    return getattr(torch, explicit) if isinstance(explicit, str) else explicit


def rope_theta(hf_config: Any) -> float:
    """The RoPE base, where transformers 5 and where older versions keep it.

    Raises:
        ConfigError: a scaled RoPE.
    """
    rope = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise ConfigError(
            f"model: expected rope_type 'default', got {rope['rope_type']!r}: scaled RoPE is not supported"
        )
    theta = rope.get("rope_theta") or getattr(hf_config, "rope_theta", None)
    if theta is None:
        raise ConfigError(
            "model: expected rope_theta in the Hugging Face configuration, got none: add it to config.json"
        )
    return theta


def check_model(args: argparse.Namespace, hf_config: Any) -> None:
    """Refuses what the layout cannot cut evenly and what does not run here.

    Raises:
        ConfigError: naming the flag and the value.
    """
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    _check_divides("--tensor-model-parallel-size", tp, "attention heads", hf_config.num_attention_heads)
    _check_divides("--tensor-model-parallel-size", tp, "key/value heads", hf_config.num_key_value_heads)
    _check_divides("--tensor-model-parallel-size", tp, "MLP channels", hf_config.intermediate_size)
    _check_divides("--tensor-model-parallel-size", tp, "vocabulary entries", hf_config.vocab_size)
    _check_divides("--pipeline-model-parallel-size", pp, "layers", hf_config.num_hidden_layers)
    if getattr(args, "sequence_parallel", False):
        raise ConfigError(
            "--sequence-parallel: expected off, got on: this launcher does not support it, remove the flag"
        )
    for name in ("hidden_dropout", "attention_dropout"):
        if not torch.cuda.is_available() and getattr(args, name, 0.0) > 0:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag}: expected 0 without CUDA, got {getattr(args, name)}: set {flag} 0")


def _check_divides(flag: str, size: int, what: str, count: int) -> None:
    if count % size:
        raise ConfigError(
            f"{flag}: expected a divisor of the {count} {what}, got {size}: change the flag or the model"
        )


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
        hidden_dropout=getattr(args, "hidden_dropout", 0.0),
        attention_dropout=getattr(args, "attention_dropout", 0.0),
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=pp,
        context_parallel_size=args.context_parallel_size,
        calculate_per_token_loss=getattr(args, "calculate_per_token_loss", False),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        use_cpu_initialization=not cuda,
        # The fused forms go through torch.compile, which wants a C++ compiler on a CPU.
        bias_activation_fusion=cuda,
        bias_dropout_fusion=cuda,
        batch_p2p_sync=cuda,
        variable_seq_lengths=pp > 1,  # packed micro-batches differ in length
        moe_token_dispatcher_type="alltoall",  # unused, but the default refuses variable_seq_lengths
    )
    config.finalize_model_grads_func = finalize_model_grads
    return config


def _layer_spec(args: argparse.Namespace) -> ModuleSpec:
    """Transformer Engine's layers on CUDA where it is installed, unless ``transformer_impl`` is "local"."""
    if HAVE_TE and torch.cuda.is_available() and getattr(args, "transformer_impl", None) != "local":
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    return spec


def _ddp_config(args: argparse.Namespace) -> DistributedDataParallelConfig:
    cuda = torch.cuda.is_available()
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=params_dtype(args).itemsize < 4,
        use_distributed_optimizer=cuda,
        overlap_grad_reduce=cuda and getattr(args, "overlap_grad_reduce", False),
    )


def random_weights(args: argparse.Namespace, hf_config: Any) -> GetTensor:
    """Initial Hugging Face tensors, each drawn from a seed made of ``args.seed`` and its name.

    Normal with std ``args.init_method_std`` (0.02), the projections into the residual stream divided by
    sqrt(2 * layers) as Megatron does; norms are 1. Any layout that asks for a name gets the same numbers.
    """
    std = getattr(args, "init_method_std", None) or 0.02
    scaled = std / math.sqrt(2 * hf_config.num_hidden_layers)

    def get_tensor(name: str) -> Tensor:
        shape = hf_shape(name, hf_config)
        if len(shape) == 1:
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{args.seed}:{name}".encode()))
        return torch.randn(shape, generator=generator) * (scaled if name.endswith(_RESIDUAL) else std)

    return get_tensor


_RESIDUAL = ("o_proj.weight", "down_proj.weight")


def hf_shape(name: str, hf_config: Any) -> tuple[int, ...]:
    """Shape of a Qwen3 tensor by its Hugging Face name."""
    hidden, width, mlp = hf_config.hidden_size, hf_config.head_dim, hf_config.intermediate_size
    queries, keys = hf_config.num_attention_heads * width, hf_config.num_key_value_heads * width
    shapes = {
        "embed_tokens": (hf_config.vocab_size, hidden),
        "lm_head": (hf_config.vocab_size, hidden),
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (mlp, hidden),
        "up_proj": (mlp, hidden),
        "down_proj": (hidden, mlp),
        "q_norm": (width,),
        "k_norm": (width,),
    }
    return shapes.get(name.split(".")[-2], (hidden,))


def unwrap(chunk: nn.Module) -> GPTModel:
    """The GPTModel inside its wrappers."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module
    return chunk
