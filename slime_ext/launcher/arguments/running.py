"""Flags of the rollout engine and of what a run leaves behind."""

from __future__ import annotations

from slime_ext.launcher.arguments.flags import Flag, integer, number, one_of

ENGINE = (
    Flag(
        "--sglang-dtype",
        one_of("auto", "float32", "bfloat16", "float16"),
        "auto",
        help="number format of the engine; auto: the trainer's",
    ),
    Flag("--sglang-server-url", str, help="use the server that runs there; ours"),
    Flag("--sglang-port", integer, help="port of the server that is started; default: a free one; ours"),
    Flag(
        "--sglang-python",
        str,
        help="interpreter of the SGLang environment; default .venv-sglang/bin/python; ours",
    ),
    Flag("--sglang-server-concurrency", integer, 512, help="most requests under way"),
    Flag("--sglang-context-length", integer, help="most tokens of prompt and response in the engine"),
    Flag("--sglang-max-total-tokens", integer, help="size of the engine's cache in tokens"),
    Flag("--sglang-max-running-requests", integer, help="most sequences the engine runs at once"),
    Flag("--sglang-attention-backend", str, help="the engine's attention; default torch_native without CUDA"),
    Flag("--sglang-mem-fraction-static", number, help="share of memory for weights and cache"),
    Flag("--sglang-request-timeout", number, 300.0, help="seconds until a request is tried again; ours"),
    Flag("--sglang-start-timeout", number, 300.0, help="seconds the server may take to start; ours"),
    Flag("--sglang-max-restarts", integer, 3, help="times a dead server is started again; ours"),
)

OUTPUT = (
    Flag("--run-dir", str, "runs", help="directory of all runs; ours"),
    Flag(
        "--run-name",
        str,
        help="directory of this run below it; default: the name of --config, numbered; ours",
    ),
    Flag("--save", str, help="directory of checkpoints; default: checkpoints in the run's directory"),
    Flag("--load", str, help="directory of checkpoints to go on from"),
    Flag("--save-interval", integer, help="rollouts between checkpoints; default: one at the end"),
    Flag("--save-keep", integer, 2, help="newest checkpoints kept; 0: all; ours"),
    Flag("--no-save-optim", help="leave the optimizer out of checkpoints; a run cannot go on from them"),
    Flag("--dump-details", str, help="directory of the dumps; default: the run's directory"),
    Flag("--no-dump-details", help="write no dumps; ours"),
    Flag("--save-debug-rollout-data", str, help="path of rollout dumps, with {rollout_id}"),
    Flag("--save-debug-train-data", str, help="path of train dumps, with {rollout_id} and {rank}"),
    Flag("--use-tensorboard", help="accepted; events are always written to the run's directory"),
    Flag("--tb-project-name", str, help="directory of TensorBoard events; default: tensorboard in the run's"),
    Flag("--tb-experiment-name", str, help="directory below it"),
)
