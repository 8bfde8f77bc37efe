"""Flags of every run on a machine without CUDA, random models, and the reward of the letters."""

from __future__ import annotations

from argparse import Namespace
from functools import cache
from pathlib import Path
from typing import Any

GRPO = (
    "--advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --optimizer adam --adam-beta2 0.95 "
    "--weight-decay 0.0 --clip-grad 1.0"
).split()


def cpu_flags(of_megatron: bool = True) -> list[str]:
    """What every run on a machine without CUDA needs; the layers only where Megatron trains."""
    layers = ("--spec", "slime_ext_cpu.stand_ins.layers", "layer_spec") if of_megatron else ()
    return [
        *(*layers, "--transformer-impl", "local"),
        *("--distributed-backend", "gloo", "--attention-dropout", "0.0", "--hidden-dropout", "0.0"),
        *("--no-rope-fusion", "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion"),
        *("--no-bias-swiglu-fusion", "--no-bias-dropout-fusion", "--no-persist-layer-norm"),
        *("--attention-softmax-in-fp32", "--accumulate-allreduce-grads-in-fp32"),
        *("--cp-comm-type", "all_gather"),  # the one that attention without Transformer Engine has
    ]


def engine_flags(context: int = 64, tokens: int = 16384, concurrency: int = 24) -> list[str]:
    """One SGLang engine on a CPU.

    Args:
        context: longest prompt with its response, tokens.
        tokens: size of the KV cache.
        concurrency: requests at a time; for each, the hosts' HTTP client looks at all of its connections, so
            that 64 of them take twice as long.
    """
    return [
        *("--rollout-num-gpus", "1", "--rollout-num-gpus-per-engine", "1", "--sglang-device", "cpu"),
        *("--sglang-attention-backend", "torch_native", "--sglang-disable-cuda-graph"),
        *("--router-prometheus-host", "127.0.0.1"),  # by default it listens on every address
        "--router-disable-circuit-breaker",  # a busy machine answers late: the only engine must stay in use
        "--sglang-sleep-on-idle",  # the scheduler otherwise polls without pause, on a core of its own
        *("--sglang-log-level", "warning", "--sglang-log-level-http", "warning"),  # or a line per request
        *("--sglang-context-length", str(context), "--sglang-max-total-tokens", str(tokens)),
        *("--sglang-max-running-requests", str(concurrency), "--sglang-server-concurrency", str(concurrency)),
    ]


def write_weights(folder: Path, seed: int) -> None:
    """Random weights in bfloat16 for the config.json of a folder.

    Hugging Face sets the embedding of the pad token to zero. Behind a zero row RMSNorm multiplies gradients
    by 1/sqrt(eps) = 1000, and Megatron trains that row: here it is as random as the others.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    if config.pad_token_id is not None:
        row = model.get_input_embeddings().weight.data[config.pad_token_id]
        torch.nn.init.normal_(row, std=config.initializer_range)
    model.save_pretrained(folder)


async def reward(args: Namespace, sample: Any, **kwargs: object) -> float:
    """``tokens_in_place`` as the hosts call it at --custom-rm-path."""
    return tokens_in_place(args, sample)


def tokens_in_place(args: Namespace, sample: Any) -> float:
    """Right tokens / the longer of answer and label, in tokens, the end being one of them; in [0, 1].

    Tokens, not characters: a special token in an answer is several characters, which would move all letters
    behind it. A prompt with ``rm_type: exact`` in its metadata is worth 1 for the whole answer, else 0.
    """
    answer = sample.tokens[len(sample.tokens) - sample.response_length :]
    wanted = _ids(args.hf_checkpoint, sample.label)
    if (sample.metadata or {}).get("rm_type") == "exact":
        return float(answer == wanted)
    right = sum(a == b for a, b in zip(answer, wanted, strict=False))
    return right / max(len(answer), len(wanted))


@cache
def _ids(directory: str, label: str) -> list[int]:
    """Token ids of a label and of the end."""
    tokenizer = _tokenizer(directory)
    return [*tokenizer.encode(label, add_special_tokens=False), tokenizer.eos_token_id]


@cache
def _tokenizer(directory: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)
