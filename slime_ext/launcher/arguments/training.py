"""Flags of the optimizer step: how a rollout is cut, the loss, its correction, the optimizer."""

from __future__ import annotations

from slime_ext.launcher.arguments.flags import Flag, integer, number, one_of, refused

STEPS = (
    Flag("--global-batch-size", integer, help="samples in an optimizer step; default: the whole rollout"),
    Flag(
        "--num-steps-per-rollout",
        integer,
        help="optimizer steps in a rollout, instead of --global-batch-size",
    ),
    Flag("--micro-batch-size", integer, 1, help="samples in a forward pass"),
    Flag("--use-dynamic-batch-size", help="fill forward passes up to --max-tokens-per-gpu instead"),
    Flag("--max-tokens-per-gpu", integer, help="most tokens of a forward pass on a rank"),
    Flag("--ppo-n-minibatches", integer, 1, help="forward-backward passes in an optimizer step; ours"),
)

LOSS = (
    Flag(
        "--advantage-estimator",
        refused(
            "ppo|reinforce_plus_plus|reinforce_plus_plus_baseline",
            "exists in slime but not in this launcher",
            "grpo",
            "gspo",
            "cispo",
        ),
        "grpo",
        help="how advantages are made",
    ),
    Flag(
        "--policy-loss",
        one_of("ppo_clip", "cispo", "gspo", "sapo", "dual_clip"),
        help="the surrogate; default: ppo_clip, or what the estimator is named after; ours",
    ),
    Flag("--eps-clip", number, 0.2, help="lower clip distance of the ratio"),
    Flag("--eps-clip-high", number, help="upper clip distance; default --eps-clip"),
    Flag("--eps-clip-c", number, help="bound of the dual clip, above 1"),
    Flag("--sapo-tau-pos", number, 1.0, help="SAPO temperature for advantages >= 0; ours"),
    Flag("--sapo-tau-neg", number, 1.05, help="SAPO temperature for advantages < 0; ours"),
    Flag("--entropy-coef", number, 0.0, help="weight of the entropy bonus"),
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
    Flag("--tis-clip", number, 2.0, help="upper bound of the importance weight"),
    Flag("--tis-clip-low", number, 0.0, help="lower bound of the importance weight"),
    Flag(
        "--custom-tis-function-path",
        str,
        help="module.function of the correction, such as slime_ext.tis.correct",
    ),
    Flag("--custom-config-path", str, help="YAML file with flag values and the key slime_ext"),
    Flag("--get-mismatch-metrics", help="call the correction for its metrics"),
    Flag(
        "--use-rollout-logprobs",
        help="anchor the ratio at the sampler's log-probs (no proximal forward pass)",
    ),
    Flag("--custom-pg-loss-reducer-function-path", str, help="module.function that makes the loss reducer"),
    Flag("--custom-megatron-init-path", str, help="module.function(args) called before the model is built"),
    Flag(
        "--rollout-data-postprocess-path",
        str,
        help="module.function(args, rollout_id, rollout_data) called before the steps of a rollout",
    ),
    Flag(
        "--custom-megatron-before-train-step-hook-path",
        str,
        help="module.function(args, rollout_id, step_id, "
        "model, optimizer, opt_param_scheduler) called before each optimizer step",
    ),
    Flag(
        "--custom-rollout-log-function-path",
        str,
        help="module.function(rollout_id, args, samples, "
        "rollout_extra_metrics, rollout_time) called after sampling",
    ),
)

OPTIMIZER = (
    Flag("--lr", number, 1e-6, help="learning rate"),
    Flag("--min-lr", number, 0.0, help="learning rate at the end of the decay"),
    Flag("--lr-decay-style", one_of("constant", "linear", "cosine"), "linear", help="shape of the decay"),
    Flag("--lr-warmup-iters", integer, 0, help="steps of linear warm-up"),
    Flag("--lr-decay-iters", integer, help="steps until --min-lr; default: all steps of the run"),
    Flag("--weight-decay", number, 0.01, help="AdamW weight decay"),
    Flag("--adam-beta1", number, 0.9, help="AdamW beta 1"),
    Flag("--adam-beta2", number, 0.999, help="AdamW beta 2"),
    Flag("--adam-eps", number, 1e-8, help="AdamW epsilon"),
    Flag("--clip-grad", number, 1.0, help="largest gradient norm; 0: no limit"),
    Flag("--seed", integer, 1234, help="seed of the initial weights"),
)
