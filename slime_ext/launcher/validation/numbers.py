"""Numbers against each other, and flags that exclude or need each other."""

from __future__ import annotations

import argparse

from slime_ext.errors import ConfigError


def check_batches(args: argparse.Namespace) -> None:
    """An optimizer step divides over ranks, then over minibatches, then over micro-batches."""
    ranks, parts = args.data_parallel_size, args.ppo_n_minibatches
    _divide("--global-batch-size", args.global_batch_size, ranks, "data-parallel ranks")
    local = args.global_batch_size // ranks
    _divide("--ppo-n-minibatches: samples of a step on a rank", local, parts, "minibatches")
    _divide("--micro-batch-size: samples of a minibatch", local // parts, args.micro_batch_size, "a pass")


def _divide(where: str, total: int, parts: int, of_what: str) -> None:
    if total % parts:
        raise ConfigError(f"{where}: expected a multiple of {parts} ({of_what}), got {total}")


def check_schedule(args: argparse.Namespace) -> None:
    """Fills train_iters, the optimizer steps of the run; the warm-up ends before the decay does."""
    args.train_iters = args.num_rollout * args.num_steps_per_rollout
    args.lr_decay_iters = args.lr_decay_iters or args.train_iters
    if args.lr_warmup_iters >= args.lr_decay_iters:
        raise ConfigError(
            f"--lr-warmup-iters: expected fewer than the {args.lr_decay_iters} steps of --lr-decay-iters, "
            f"got {args.lr_warmup_iters}"
        )
    if args.min_lr > args.lr:
        raise ConfigError(f"--min-lr: expected at most --lr {args.lr}, got {args.min_lr}")


def check_combinations(args: argparse.Namespace) -> None:
    """Flags that exclude or need each other: the first rule that is broken is named."""
    named = args.custom_tis_function_path is not None
    rules = [
        # slime's assertions on the correction, and the calls that it would leave out in silence
        (
            args.use_tis and args.use_rollout_logprobs,
            "--use-tis: expected no --use-rollout-logprobs beside it, got both: with the sampler's log-probs "
            "as anchor nothing is left to correct",
        ),
        (
            args.get_mismatch_metrics and not named,
            "--get-mismatch-metrics: expected --custom-tis-function-path beside it, got none: name the "
            "function that makes the metrics, such as slime_ext.tis.correct",
        ),
        (
            named and not (args.use_tis or args.get_mismatch_metrics),
            "--custom-tis-function-path: expected --use-tis or --get-mismatch-metrics beside it, got none: "
            "it is never called without one of them",
        ),
        (
            args.tis_clip_low > args.tis_clip,
            f"--tis-clip-low: expected at most --tis-clip {args.tis_clip}, got {args.tis_clip_low}",
        ),
        (
            args.eps_clip_c is not None and args.advantage_estimator == "cispo",
            "--eps-clip-c: expected --advantage-estimator grpo or gspo beside it, got cispo",
        ),
        (
            args.eval_interval is not None and not args.eval_datasets,
            "--eval-interval: expected --eval-prompt-data beside it, got none",
        ),
        (args.rollout_top_k == 0, "--rollout-top-k: expected -1 or at least 1, got 0"),
        (args.bf16 and args.fp16, "--bf16: expected no --fp16 beside it, got both"),
    ]
    for broken, message in rules:
        if broken:
            raise ConfigError(message)
