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
    """Flags that exclude or need each other, where the hosts have no such rule."""
    if args.eps_clip_c is not None and args.advantage_estimator == "cispo":
        raise ConfigError("--eps-clip-c: expected --advantage-estimator grpo or gspo beside it, got cispo")
    if args.rollout_top_k == 0:
        raise ConfigError("--rollout-top-k: expected -1 or at least 1, got 0")
    if args.bf16 and args.fp16:
        raise ConfigError("--bf16: expected no --fp16 beside it, got both")
