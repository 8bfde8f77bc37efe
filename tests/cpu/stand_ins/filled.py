"""Models of transformers, and the same models of Megatron on this rank, which our loader fills."""

from __future__ import annotations

import zlib
from argparse import Namespace

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from slime_ext.errors import SlimeExtError
from slime_ext_cpu import stand_ins
from slime_ext_cpu.stand_ins import hf_weights, torch_cuda
from slime_ext_cpu.stand_ins.layers import layer_spec

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3 tied": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES),  # query, key and value have biases
    "llama": LlamaConfig(**SIZES),
    "qwen3 mixture": Qwen3MoeConfig(
        **SIZES,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
    ),
}
EXPERTS = {
    "qwen3 mixture": {
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 24,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",  # makes a CUDA stream
    }
}
SEQUENCES = [[3, 4, 5, 6, 7, 8, 9], [5, 1, 8], [40, 2, 9, 9, 7]]


def oracle(name):
    """transformers' model with weights (norms and biases too) drawn per name."""
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(key.encode()))
            )
            parameter.copy_(noise * 0.2 + (1 if "norm" in key else 0))
    return model


def saved(names, folder):
    """Writes the models of transformers to folders of their names; returns their logits [T, V] by name.

    In the folder "wider", the last norm of the first one has one weight too many.
    """
    wanted = {}
    for name in names:
        model = oracle(name)
        model.save_pretrained(folder / name, max_shard_size="20KB")  # several files
        with torch.no_grad():
            wanted[name] = torch.cat([model(torch.tensor([sequence])).logits[0] for sequence in SEQUENCES])
    model = oracle(names[0])
    model.save_pretrained(folder / "wider")
    state = {key: p.detach().clone() for key, p in model.named_parameters()}
    save_file(state | {"model.norm.weight": torch.ones(33)}, folder / "wider/model.safetensors")
    return wanted


def megatron_model(hf, name):
    """This rank's stage of a model with the stand-ins' layers, as the hosts build it."""
    tensor, pipeline = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    config = TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        layernorm_epsilon=hf.rms_norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=name == "qwen2",
        qk_layernorm=name.startswith("qwen3"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        **EXPERTS.get(name, {}),
    )
    return GPTModel(
        config,
        layer_spec(Namespace(qk_layernorm=config.qk_layernorm), config),
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=hf.rope_parameters["rope_theta"],
    )


class Wrapped(torch.nn.Module):
    """A model in the wrapper for bfloat16; the hosts' names have this one and that for data parallelism."""

    def __init__(self, model):
        super().__init__()
        self.module, self.config = model, model.config


def load():
    """Imports what the loader needs of miles, with SGLang: 1.2 s, before the ranks are forked."""
    torch_cuda.replace()
    stand_ins.install()
    import miles.backends.megatron_utils.megatron_to_hf
    import miles.backends.training_utils.parallel  # noqa: F401


def fill(model, hf, folder):
    """As a training actor of miles does, with its arguments and its parallel state."""
    from miles.backends.training_utils import parallel

    groups = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "ep": parallel_state.get_expert_model_parallel_group(),
        "etp": parallel_state.get_expert_tensor_parallel_group(),
    }
    infos = {key: Namespace(rank=g.rank(), size=g.size(), group=g) for key, g in groups.items()}
    parallel.set_parallel_state(Namespace(**infos))
    args = Namespace(
        num_experts=getattr(hf, "num_experts", None),
        swiglu=True,
        vocab_size=hf.vocab_size,
        kv_channels=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        q_lora_rank=None,
        model_name=None,
    )
    for parameter in model.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)  # as megatron.training does
    hf_weights.fill("miles", [Wrapped(model)], args, folder)


def logits(names, tensor, pipeline, folder):
    """{name: logits of a model whose files are in the folder of its name} on this rank of a layout."""
    parallel_state.initialize_model_parallel(tensor, pipeline)
    parallel_state.get_embedding_group = lambda check_initialized=True: None  # both stages load the weights
    return {name: _logits(name, folder / name) for name in names}


def _logits(name, folder):
    """[T, V / tensor] of the packed sequences on a rank of the last stage; None on the others."""
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)
    model = megatron_model(CONFIGS[name], name)
    fill(model, CONFIGS[name], folder)
    lengths = torch.tensor([len(sequence) for sequence in SEQUENCES])
    ends = F.pad(lengths.cumsum(0), (1, 0)).int()
    packed = PackedSeqParams(
        "thd", ends, ends, max_seqlen_q=int(lengths.max()), max_seqlen_kv=int(lengths.max())
    )
    ids = torch.tensor([[token for sequence in SEQUENCES for token in sequence]])
    group = parallel_state.get_pipeline_model_parallel_group()
    with torch.no_grad():
        if group.rank() == 1:
            hidden = torch.empty(ids.numel(), 1, SIZES["hidden_size"])
            torch.distributed.recv(hidden, group=group, group_src=0)
            model.set_input_tensor(hidden)
        out = model(ids, None, None, packed_seq_params=packed)
        if group.rank() == group.size() - 1:
            return out[0]
        torch.distributed.send(out, group=group, group_dst=1)


def refused(name, tensor, pipeline, folder):
    """What is said of a model that the loader refuses."""
    try:
        parallel_state.initialize_model_parallel(tensor, pipeline)
        return f"none refused it: {_logits(name, folder)}"
    except SlimeExtError as error:
        return str(error)
