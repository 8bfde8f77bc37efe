"""Flags of the rollout engine and of what a run leaves behind."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slime_ext.launcher.arguments.flags import Count, Flag, Positive, Share, Text

Keep = Annotated[int, Field(ge=0)]

ENGINE = (
    Flag(
        "--sglang-dtype",
        Literal["auto", "float32", "bfloat16", "float16"],
        "auto",
        help="number format of the engine; auto: the trainer's",
    ),
    Flag("--sglang-server-url", Text, help="use the server that runs there; ours"),
    Flag(
        "--sglang-python",
        Text,
        help="interpreter of the SGLang environment; default .venv-sglang/bin/python; ours",
    ),
    Flag("--sglang-server-concurrency", Count, 512, help="most requests under way"),
    Flag("--sglang-context-length", Count, help="most tokens of prompt and response in the engine"),
    Flag("--sglang-max-total-tokens", Count, help="size of the engine's cache in tokens"),
    Flag("--sglang-max-running-requests", Count, help="most sequences the engine runs at once"),
    Flag(
        "--sglang-attention-backend", Text, help="the engine's attention; default torch_native without CUDA"
    ),
    Flag("--sglang-mem-fraction-static", Share, help="share of memory for weights and cache"),
    Flag("--sglang-request-timeout", Positive, 300.0, help="seconds until a request is tried again; ours"),
    Flag("--sglang-start-timeout", Positive, 300.0, help="seconds the server may take to start; ours"),
    Flag("--sglang-max-restarts", Keep, 3, help="times a dead server is started again; ours"),
)

OUTPUT = (
    Flag("--run-dir", Text, "runs", help="directory of all runs; ours"),
    Flag(
        "--run-name",
        Text,
        help="directory of this run below it; default: the name of --config, numbered; ours",
    ),
    Flag("--save", Text, help="directory of checkpoints; default: checkpoints in the run's directory"),
    Flag("--load", Text, help="directory of checkpoints to go on from"),
    Flag("--save-interval", Count, help="rollouts between checkpoints; default: one at the end"),
    Flag("--save-keep", Keep, 2, help="newest checkpoints kept; 0: all; ours"),
    Flag("--no-dump-details", help="write no dumps; ours"),
)
