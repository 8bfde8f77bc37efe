"""A tiny Qwen3 in both worlds, dense or not, its arguments, ragged packed batches, a pass of the schedule."""

from __future__ import annotations

import types
import zlib
from argparse import Namespace
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, Qwen3MoeTopKRouter

from slime_ext.launcher.megatron import log_probs, model, parallel

LAYOUTS = {  # name: (ranks, tensor, pipeline, context)
    "one": (1, 1, 1, 1),
    "tp2": (2, 2, 1, 1),
    "pp2": (2, 1, 2, 1),
    "cp2": (2, 1, 1, 2),
    "dp2": (2, 1, 1, 1),
    "tp2pp2": (4, 2, 2, 1),
}
SEQUENCES = [
    list(range(3, 14)),
    [5, 1, 8],
    [40, 2, 9, 9, 7, 33, 21],
    [11, 12],
]  # ragged, none a multiple of 4


DEFAULTS = {
    "seed": 7,
    "bf16": False,
    "fp16": False,
    "distributed_timeout_minutes": 10,
    "init_method_std": 0.02,
    "transformer_impl": "local",
    "calculate_per_token_loss": False,
    "min_lr": 0.0,
    "lr_decay_style": "constant",
    "lr_warmup_iters": 0,
    "lr_decay_iters": 1_000_000,
    "weight_decay": 0.01,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "clip_grad": 1.0,
}


def tiny_args(
    tp: int = 1, pp: int = 1, cp: int = 1, dtype: torch.dtype = torch.float64, **more: Any
) -> Namespace:
    """Arguments of a layout, spelled as the launcher spells them."""
    sizes = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
    }
    return Namespace(**{**DEFAULTS, **sizes, "params_dtype": dtype, **more})


def tiny_config(tied: bool = False, experts: dict[str, Any] | None = None) -> Qwen3Config | Qwen3MoeConfig:
    """Four query heads in two groups, heads wider than hidden_size / heads, two layers."""
    sizes = {
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": 5000.0,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
    }
    return Qwen3Config(**sizes) if experts is None else Qwen3MoeConfig(**sizes, **experts)


MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
UNNORMALISED = MIXTURE | {"num_experts_per_tok": 3, "norm_topk_prob": False}


def mixtures(layout: str) -> tuple[dict[str, Any] | None, ...]:
    """The experts of the models that a layout trains: None of a dense one; a mixture only without TP."""
    return (None,) if LAYOUTS[layout][1] > 1 else (None, MIXTURE, UNNORMALISED)


def hf_model(
    tied: bool = False, dtype: torch.dtype = torch.float64, experts: dict[str, Any] | None = None
) -> PreTrainedModel:
    """transformers' model with weights (norms too) drawn per name, the oracle of everything here."""
    config = tiny_config(tied, experts)
    config._experts_implementation = "eager"  # the default knows no float64
    oracle = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype).eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            noise = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))
            )
            parameter.copy_(noise * 0.2 + (1 if "norm" in name else 0))
    if dtype is torch.float64:
        _keep_in_float64(oracle)
    return oracle


def _keep_in_float64(oracle: PreTrainedModel) -> None:
    """transformers computes norms in float32, whatever the weights; and routing weights, as Megatron does,
    which takes the softmax of the chosen experts' logits where transformers divides chosen probabilities."""

    def norm(self: nn.Module, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    def route(self: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x.reshape(-1, self.hidden_dim) @ self.weight.T
        chosen, indices = logits.topk(self.top_k)
        if not self.norm_topk_prob:
            return logits, logits.float().softmax(-1).gather(-1, indices).to(x.dtype), indices
        return logits, chosen.float().softmax(-1).to(x.dtype), indices

    forwards = {Qwen3RMSNorm: norm, Qwen3MoeRMSNorm: norm, Qwen3MoeTopKRouter: route}
    for module in oracle.modules():
        if type(module) in forwards:
            module.forward = types.MethodType(forwards[type(module)], module)


def hf_state(oracle: PreTrainedModel) -> dict[str, Tensor]:
    """Its parameters as they are named in its files, a tied one once, cut off from the model."""
    state = {name: parameter.detach().clone() for name, parameter in oracle.named_parameters()}
    return revert_weight_conversion(oracle, state)


def start(
    layout: str,
    tied: bool = False,
    dtype: torch.dtype = torch.float64,
    experts: dict[str, Any] | None = None,
    **more: Any,
) -> list[Any]:
    """Joins the layout's groups and builds this rank's model with the oracle's weights."""
    args = tiny_args(*LAYOUTS[layout][1:], dtype, **more)
    parallel.initialize(args)
    oracle = hf_model(tied, dtype, experts)
    return model.build_model(args, oracle.config, hf_state(oracle).__getitem__)


def slice_for_rank(sequence: list[int], rank: int, size: int) -> list[int]:
    """What a context-parallel rank holds of a sequence: chunk by chunk, zero padded."""
    if size == 1:
        return sequence
    chunk = -(-len(sequence) // (2 * size))
    padded = sequence + [0] * (2 * size * chunk - len(sequence))
    return [token for i in (rank, 2 * size - 1 - rank) for token in padded[i * chunk : (i + 1) * chunk]]


def pack(sequences: list[list[int]], rank: int = 0, size: int = 1) -> tuple[Tensor, PackedSeqParams]:
    """([1, T] token ids of one context-parallel rank, parameters)."""
    local = [slice_for_rank(sequence, rank, size) for sequence in sequences]
    lengths = torch.tensor([len(part) * size for part in local])
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).int()
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=int(lengths.max()),
        max_seqlen_kv=int(lengths.max()),
    )
    return torch.tensor([list(chain.from_iterable(local))]), params


def micro_batches() -> list[list[list[int]]]:
    """Two micro-batches of different length, other sequences on each data-parallel rank."""
    group = parallel.dp_group()
    return (
        [SEQUENCES[:2], SEQUENCES[2:]] if group.size() == 1 else [[s] for s in SEQUENCES[group.rank() :: 2]]
    )


def run_schedule(
    chunks: list[Any], loss_of: Callable[..., tuple[Tensor, dict]], forward_only: bool
) -> list[dict]:
    """One pass of all micro-batches through the schedule, loss_of(logits [T, V/tp], sequences) for each."""
    cp = parallel.cp_group()
    batches = micro_batches()

    def forward(iterator: Any, chunk: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict]]]:
        sequences = next(iterator)
        ids, params = pack(sequences, cp.rank(), cp.size())
        return chunk(ids, None, None, packed_seq_params=params), lambda logits: loss_of(logits[0], sequences)

    return get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(batches),
        model=chunks,
        num_microbatches=len(batches),
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
    )


def sequence_loss(logits: Tensor, sequences: list[list[int]]) -> tuple[Tensor, dict]:
    """-sum of weighted log p(next token) over all sequences of all ranks, after Megatron's scaling."""
    cp, dp = parallel.cp_group(), parallel.dp_group()

    def local(values: Callable[[list[int]], list[float]]) -> Tensor:
        parts = (slice_for_rank(values(sequence), cp.rank(), cp.size()) for sequence in sequences)
        return torch.tensor(list(chain.from_iterable(parts)))

    targets, weights = local(next_tokens), local(weights_of).double()
    loss = -(log_probs.log_probs_and_entropy(logits, targets)[0] * weights).sum()
    return loss * len(micro_batches()) * dp.size(), {"loss": loss.detach().clone()}


def next_tokens(sequence: list[int]) -> list[int]:
    """The targets of a sequence; the last position has none and weighs nothing."""
    return [*sequence[1:], 0]


def weights_of(sequence: list[int]) -> list[float]:
    """Weight of each position's log-prob."""
    return [(1 + token / 50) / 10 for token in sequence[1:]] + [0.0]


def hf_loss(oracle: PreTrainedModel) -> Tensor:
    """The loss of ``sequence_loss`` from transformers, sequence by sequence."""
    total = torch.zeros((), dtype=torch.float64)
    for sequence in SEQUENCES:
        logits = oracle(torch.tensor([sequence])).logits[0].double()
        chosen = logits.log_softmax(-1).gather(-1, torch.tensor(next_tokens(sequence))[:, None])[:, 0]
        total = total - (chosen * torch.tensor(weights_of(sequence)).double()).sum()
    return total
