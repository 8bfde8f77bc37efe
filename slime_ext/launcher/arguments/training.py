"""Flags of the optimizer step: how a rollout is cut, the loss, its correction, the optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slime_ext.launcher.arguments.flags import Beta, Count, Flag, NotNegative, Positive, Seed, Text

Clip = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Above1 = Annotated[float, Field(gt=1, allow_inf_nan=False)]
Steps = Annotated[int, Field(ge=0)]

STEPS = (
    Flag("--global-batch-size", Count, help="samples in an optimizer step; default: the whole rollout"),
    Flag(
        "--num-steps-per-rollout",
        Count,
        help="optimizer steps in a rollout, instead of --global-batch-size",
    ),
    Flag("--micro-batch-size", Count, 1, help="samples in a forward pass"),
    Flag("--ppo-n-minibatches", Count, 1, help="forward-backward passes in an optimizer step; ours"),
)

LOSS = (
    Flag(
        "--advantage-estimator",
        Literal["grpo", "gspo", "cispo"],
        "grpo",
        help="group-relative advantages, with the policy loss that is named so; grpo: PPO's clip",
    ),
    Flag("--eps-clip", Clip, 0.2, help="lower clip distance of the ratio"),
    Flag("--eps-clip-high", NotNegative, help="upper clip distance; default --eps-clip"),
    Flag("--eps-clip-c", Above1, help="bound of the dual clip, which it switches on; above 1"),
    Flag("--entropy-coef", NotNegative, 0.0, help="weight of the entropy bonus"),
    Flag(
        "--disable-grpo-std-normalization",
        clears="grpo_std_normalization",
        help="do not divide advantages by the group's standard deviation",
    ),
    Flag(
        "--disable-rewards-normalization",
        clears="rewards_normalization",
        help="use rewards as advantages as they are",
    ),
    Flag("--normalize-advantages", help="whiten the advantages over the rollout"),
    Flag("--calculate-per-token-loss", help="mean over tokens instead of over samples"),
    Flag("--recompute-loss-function", help="compute the loss again in the backward pass"),
)

CORRECTION = (
    Flag("--use-tis", help="call the correction and use what it returns"),
    Flag("--tis-clip", Positive, 2.0, help="upper bound of the importance weight"),
    Flag("--tis-clip-low", NotNegative, 0.0, help="lower bound of the importance weight"),
    Flag(
        "--custom-tis-function-path",
        Text,
        help="module.function of the correction, such as slime_ext.tis.correct",
    ),
    Flag("--custom-config-path", Text, help="YAML file with flag values and the key slime_ext"),
    Flag("--get-mismatch-metrics", help="call the correction for its metrics"),
    Flag(
        "--use-rollout-logprobs",
        help="anchor the ratio at the sampler's log-probs (no proximal forward pass)",
    ),
    Flag("--custom-megatron-init-path", Text, help="module.function(args) called before the model is built"),
    Flag(
        "--rollout-data-postprocess-path",
        Text,
        help="module.function(args, rollout_id, rollout_data) called before the steps of a rollout",
    ),
    Flag(
        "--custom-rollout-log-function-path",
        Text,
        help="module.function(rollout_id, args, samples, "
        "rollout_extra_metrics, rollout_time) called after sampling",
    ),
)

OPTIMIZER = (
    Flag("--lr", NotNegative, 1e-6, help="learning rate"),
    Flag("--min-lr", NotNegative, 0.0, help="learning rate at the end of the decay"),
    Flag("--lr-decay-style", Literal["constant", "linear", "cosine"], "linear", help="shape of the decay"),
    Flag("--lr-warmup-iters", Steps, 0, help="steps of linear warm-up"),
    Flag("--lr-decay-iters", Count, help="steps until --min-lr; default: all steps of the run"),
    Flag("--weight-decay", NotNegative, 0.01, help="AdamW weight decay"),
    Flag("--adam-beta1", Beta, 0.9, help="AdamW beta 1"),
    Flag("--adam-beta2", Beta, 0.999, help="AdamW beta 2"),
    Flag("--adam-eps", Positive, 1e-8, help="AdamW epsilon"),
    Flag("--clip-grad", NotNegative, 1.0, help="largest gradient norm; 0: no limit"),
    Flag("--seed", Seed, 1234, help="seed of the initial weights"),
)
