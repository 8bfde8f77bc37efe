"""Flags of sampling: prompts, the sampling distribution, rewards, evaluation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slime_ext.launcher.arguments.flags import Count, Flag, NotNegative, Positive, Seed, Share, Text

TopK = Annotated[int, Field(ge=-1)]

DATA = (
    Flag("--prompt-data", Text, required=True, help="JSONL file, one prompt a line"),
    Flag("--input-key", Text, "input", help="key of the prompt in a line"),
    Flag("--label-key", Text, help="key of the label in a line"),
    Flag("--num-rollout", Count, required=True, help="number of rollouts"),
    Flag("--rollout-shuffle", help="a new order of the prompts each epoch"),
    Flag("--rollout-seed", Seed, 42, help="seed of that order and of sampling"),
)

SAMPLING = (
    Flag("--rollout-batch-size", Count, required=True, help="prompts in a rollout"),
    Flag("--n-samples-per-prompt", Count, 1, help="samples of each prompt"),
    Flag(
        "--rollout-temperature",
        Positive,
        1.0,
        help="sampling temperature, applied to the trainer's logits too",
    ),
    Flag("--rollout-top-p", Share, 1.0, help="sample from the smallest set with this probability"),
    Flag("--rollout-top-k", TopK, -1, help="sample from the k likeliest tokens; -1: all"),
    Flag("--rollout-max-prompt-len", Count, help="longer prompts are left out"),
    Flag("--rollout-max-response-len", Count, required=True, help="most tokens of a response"),
    Flag(
        "--rollout-stop-token-ids",
        int,
        many=True,
        help="tokens that end a response; default: the tokenizer's end of sequence",
    ),
    Flag("--update-weights-interval", Count, 1, help="rollouts between two pushes of weights to the engine"),
    Flag(
        "--rollout-weight-rounding",
        Literal["fp8", "fp8_block", "int8", "int4"],
        help="round the weights that the engine samples with, as a quantised one would; ours",
    ),
)

REWARD = (
    Flag("--rm-type", Text, help="built-in reward: characters or exact"),
    Flag("--custom-rm-path", Text, help="module.function(args, sample) that replaces it; may be async"),
)

EVAL = (
    Flag("--eval-prompt-data", Text, many=True, help="name and path, name and path, ..."),
    Flag("--eval-interval", Count, help="rollouts between evaluations"),
    Flag("--skip-eval-before-train", help="no evaluation before the first step"),
    Flag("--n-samples-per-eval-prompt", Count, 1, help="samples of each held-out prompt"),
    Flag("--eval-temperature", NotNegative, help="default --rollout-temperature; 0 is greedy"),
    Flag(
        "--eval-trained-weights",
        help="evaluate the trainer's weights where the engine samples with older or rounded ones; ours",
    ),
    Flag("--eval-max-response-len", Count, help="default --rollout-max-response-len"),
)
