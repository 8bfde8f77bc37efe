"""Defines flags for runs without CUDA, random models, and the reward of `letters`."""

from __future__ import annotations

from argparse import Namespace
from functools import cache
from pathlib import Path
from typing import Any

from slime_ext.tools.collection import importing

GRPO = (
    "--advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --optimizer adam --adam-beta2 0.95 "
    "--weight-decay 0.0 --clip-grad 1.0"
).split()


def cpu_flags(of_megatron: bool = True) -> list[str]:
    """Returns the flags that every run without CUDA needs. Only Megatron gets the flag for its layers."""
    layers = ("--spec", "slime_ext_cpu.stand_ins.layers", "layer_spec") if of_megatron else ()
    return [
        *(*layers, "--transformer-impl", "local"),
        *("--distributed-backend", "gloo", "--attention-dropout", "0.0", "--hidden-dropout", "0.0"),
        *("--no-rope-fusion", "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion"),
        *("--no-bias-swiglu-fusion", "--no-bias-dropout-fusion", "--no-persist-layer-norm"),
        *("--attention-softmax-in-fp32", "--accumulate-allreduce-grads-in-fp32"),
        *("--cp-comm-type", "all_gather"),  # attention without Transformer Engine supports no other
    ]


def engine_flags(context: int = 64, tokens: int = 16384, concurrency: int = 24) -> list[str]:
    """Returns the flags of a single SGLang engine on a CPU.

    Args:
        context: most tokens of a prompt with its response.
        tokens: size of the KV cache, tokens.
        concurrency: number of requests at the same time. The hosts' HTTP client looks at all of its
            connections for each request, so 64 of them take twice as long.
    """
    return [
        *("--rollout-num-gpus", "1", "--rollout-num-gpus-per-engine", "1", "--sglang-device", "cpu"),
        *("--sglang-attention-backend", "torch_native", "--sglang-disable-cuda-graph"),
        *("--router-prometheus-host", "127.0.0.1"),  # by default it listens on every address
        "--router-disable-circuit-breaker",  # it would drop the only engine if a busy machine answers late
        "--sglang-sleep-on-idle",  # otherwise the scheduler keeps a core busy with polling
        # By default SGLang logs a line per request.
        *("--sglang-log-level", "warning", "--sglang-log-level-http", "warning"),
        *("--sglang-context-length", str(context), "--sglang-max-total-tokens", str(tokens)),
        *("--sglang-max-running-requests", str(concurrency), "--sglang-server-concurrency", str(concurrency)),
    ]


def write_weights(folder: Path, seed: int) -> None:
    """Writes random weights in bfloat16 for the config.json in a folder.

    Hugging Face sets the embedding of the pad token to zero, but Megatron trains that row, and RMSNorm
    multiplies the gradients of a zero row by 1/sqrt(eps) = 1000. So we fill it with random values, too.
    """
    with importing("transformers"):
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        config = AutoConfig.from_pretrained(folder)
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).bfloat16()  # imports more
    logging.disable_progress_bar()
    if config.pad_token_id is not None:
        row = model.get_input_embeddings().weight.data[config.pad_token_id]
        torch.nn.init.normal_(row, std=config.initializer_range)
    model.save_pretrained(folder)


async def reward(args: Namespace, sample: Any, **kwargs: object) -> float:
    """Returns ``tokens_in_place`` in the form in which the hosts call --custom-rm-path."""
    return tokens_in_place(args, sample)


def tokens_in_place(args: Namespace, sample: Any) -> float:
    """Returns right tokens / max(tokens of the answer, tokens of the label), in [0, 1].

    Lengths count tokens, and the end is a token. Characters would not do: a special token in an answer has
    several characters, which would shift all letters after it. If a prompt's metadata has ``rm_type: exact``,
    the reward is 1 for exactly the label, otherwise 0.
    """
    answer = sample.tokens[len(sample.tokens) - sample.response_length :]
    expected = _ids(args.hf_checkpoint, sample.label)
    if (sample.metadata or {}).get("rm_type") == "exact":
        return float(answer == expected)
    right = sum(a == b for a, b in zip(answer, expected, strict=False))
    return right / max(len(answer), len(expected))


@cache
def _ids(directory: str, label: str) -> list[int]:
    """Returns the token ids of a label, followed by the id of the end."""
    tokenizer = _tokenizer(directory)
    return [*tokenizer.encode(label, add_special_tokens=False), tokenizer.eos_token_id]


@cache
def _tokenizer(directory: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)
