"""Flags of the model, of its split over ranks and of its number format. --hf-checkpoint is the model."""

from __future__ import annotations

from typing import Literal

from slime_ext.launcher.arguments.flags import Count, Flag, Positive, Text

MODEL = (
    Flag(
        "--hf-checkpoint",
        Text,
        required=True,
        help="directory with config.json and the tokenizer; without "
        "weights the model starts from random numbers of --seed",
    ),
    Flag(
        "--transformer-impl",
        Literal["local", "transformer_engine"],
        "transformer_engine",
        help="whose layers; Transformer Engine's need CUDA, without it they are Megatron's local ones",
    ),
    Flag("--init-method-std", Positive, 0.02, help="standard deviation of random initial weights"),
)

PARALLEL = (
    Flag("--tensor-model-parallel-size", Count, 1, help="ranks that share each layer"),
    Flag("--pipeline-model-parallel-size", Count, 1, help="ranks that share the stack of layers"),
    Flag("--context-parallel-size", Count, 1, help="ranks that share each sequence"),
    Flag(
        "--actor-num-gpus-per-node",
        Count,
        help="training ranks; default tensor x pipeline x context, "
        "what is above that is data parallel (slime's default is 8)",
    ),
    Flag("--distributed-timeout-minutes", Count, 10, help="how long a collective may wait"),
)

PRECISION = (
    Flag("--bf16", help="train in bfloat16 (CUDA)"),
    Flag("--fp16", help="train in float16 (CUDA)"),
    Flag(
        "--params-dtype",
        Literal["float32", "float64"],
        "float32",
        help="type of weights and arithmetic without --bf16 or --fp16; ours",
    ),
)
