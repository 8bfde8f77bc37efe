"""A tiny Qwen3 model, its arguments and ragged packed batches, shared by the Megatron tests."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

LAYOUTS = {  # name: (ranks, tensor, pipeline, context)
    "one": (1, 1, 1, 1),
    "tp2": (2, 2, 1, 1),
    "pp2": (2, 1, 2, 1),
    "cp2": (2, 1, 1, 2),
    "dp2": (2, 1, 1, 1),
    "tp2pp2": (4, 2, 2, 1),
}
SEQUENCES = [list(range(3, 14)), [5, 1, 8], [40, 2, 9, 9, 7, 33, 21]]  # ragged; the shortest is below 2 * cp


def tiny_args(
    tp: int = 1, pp: int = 1, cp: int = 1, dtype: torch.dtype = torch.float64, **more: Any
) -> Namespace:
    """Arguments of a layout, spelled as the launcher spells them."""
    return Namespace(
        **{
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "context_parallel_size": cp,
            "params_dtype": dtype,
            "seed": 7,
            "bf16": False,
            "fp16": False,
            "init_method_std": 0.2,
            **more,
        }
    )


def tiny_config(tied: bool = False) -> Any:
    """Four query heads in two groups, heads wider than hidden_size / heads, two layers."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_theta=5000.0,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )


def pack(
    sequences: list[list[int]], cp_rank: int = 0, cp_size: int = 1
) -> tuple[torch.Tensor, PackedSeqParams]:
    """([1, T] token ids of one context-parallel rank, parameters): plain Python, chunk by chunk."""
    local, ends = [], [0]
    for sequence in sequences:
        chunk = -(-len(sequence) // (2 * cp_size)) if cp_size > 1 else len(sequence)
        total = 2 * cp_size * chunk if cp_size > 1 else chunk
        padded = sequence + [0] * (total - len(sequence))
        if cp_size > 1:
            for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
                local += padded[index * chunk : (index + 1) * chunk]
        else:
            local += padded
        ends.append(ends[-1] + total)
    cu_seqlens = torch.tensor(ends, dtype=torch.int32)
    longest = int(cu_seqlens.diff().max())
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return torch.tensor([local]), params
