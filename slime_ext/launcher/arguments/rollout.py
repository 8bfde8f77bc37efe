"""Flags of sampling: prompts, the sampling distribution, rewards, evaluation."""

from __future__ import annotations

from slime_ext.launcher.arguments.flags import Flag, integer, number

DATA = (
    Flag("--prompt-data", str, required=True, help="JSONL file, one prompt a line"),
    Flag("--input-key", str, "input", help="key of the prompt in a line"),
    Flag("--label-key", str, help="key of the label in a line"),
    Flag("--metadata-key", str, "metadata", help="key of the metadata in a line"),
    Flag("--num-rollout", integer, help="number of rollouts"),
    Flag("--num-epoch", integer, help="passes over the prompts, when --num-rollout is not given"),
    Flag("--rollout-shuffle", help="a new order of the prompts each epoch"),
    Flag("--rollout-seed", integer, 42, help="seed of that order and of sampling"),
)

SAMPLING = (
    Flag("--rollout-batch-size", integer, required=True, help="prompts in a rollout"),
    Flag("--n-samples-per-prompt", integer, 1, help="samples of each prompt"),
    Flag(
        "--rollout-temperature", number, 1.0, help="sampling temperature, applied to the trainer's logits too"
    ),
    Flag("--rollout-top-p", number, 1.0, help="sample from the smallest set with this probability"),
    Flag("--rollout-top-k", integer, -1, help="sample from the k likeliest tokens; -1: all"),
    Flag("--rollout-max-context-len", integer, help="most tokens of prompt and response"),
    Flag("--rollout-max-prompt-len", integer, help="longer prompts are left out"),
    Flag("--rollout-max-response-len", integer, required=True, help="most tokens of a response"),
    Flag(
        "--rollout-stop-token-ids",
        integer,
        nargs="+",
        help="tokens that end a response; default: the tokenizer's end of sequence",
    ),
    Flag(
        "--update-weights-interval", integer, 1, help="rollouts between two pushes of weights to the engine"
    ),
)

REWARD = (
    Flag("--rm-type", str, help="built-in reward: characters or exact"),
    Flag("--custom-rm-path", str, help="module.function(args, sample) that replaces it; may be async"),
    Flag("--reward-key", str, help="key of the reward when it is a mapping"),
    Flag("--eval-reward-key", str, help="the same in evaluation; default --reward-key"),
)

EVAL = (
    Flag("--eval-prompt-data", str, nargs="+", help="name and path, name and path, ..."),
    Flag("--eval-interval", integer, help="rollouts between evaluations"),
    Flag("--skip-eval-before-train", help="no evaluation before the first step"),
    Flag("--n-samples-per-eval-prompt", integer, 1, help="samples of each held-out prompt"),
    Flag("--eval-input-key", str, help="default --input-key"),
    Flag("--eval-label-key", str, help="default --label-key"),
    Flag("--eval-temperature", number, help="default --rollout-temperature; 0 is greedy"),
    Flag("--eval-top-p", number, help="default --rollout-top-p"),
    Flag("--eval-top-k", integer, help="default --rollout-top-k"),
    Flag("--eval-max-response-len", integer, help="default --rollout-max-response-len"),
)
