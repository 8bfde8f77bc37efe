"""Values that follow from other flags, in slime's order, and flags that contradict each other."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from slime_ext.errors import ConfigError
from slime_ext.host.contract import flag_of
from slime_ext.launcher.arguments.parser import parse

VANILLA = "slime_ext.tis.vanilla_tis_function"


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Flags and files to one namespace with slime's attribute names, open values filled in.

    Beside the flags it has: notes (lines to print), slime_ext (the mapping under that key, or None),
    world_size, data_parallel_size, eval_datasets (pairs of name and path), run_path, tensorboard_dir.
    Reads no prompt file and no model: `validation.validate` does.

    Raises:
        ConfigError: one line with the flag or key, what was expected and what came.
    """
    args = parse(list(argv))
    _ranks(args)
    _steps(args)
    _loss(args)
    _evaluation(args)
    _engine(args)
    _output(args)
    _schedule(args)
    _check_combinations(args)
    return args


def _fill(args: argparse.Namespace, name: str, value: object) -> None:
    if getattr(args, name, None) is None:
        setattr(args, name, value)


def _ranks(args: argparse.Namespace) -> None:
    """World size and data-parallel size.

    Raises:
        ConfigError: training ranks that copies of the model do not share evenly.
    """
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    model_ranks = tensor * pipeline * args.context_parallel_size
    _fill(args, "actor_num_gpus_per_node", model_ranks)
    args.world_size = args.actor_num_gpus_per_node
    if args.world_size % model_ranks:
        raise ConfigError(
            f"--actor-num-gpus-per-node: expected a multiple of {model_ranks} (tensor x pipeline x context = "
            f"{tensor} x {pipeline} x {args.context_parallel_size}), got {args.world_size}"
        )
    args.data_parallel_size = args.world_size // model_ranks


def _steps(args: argparse.Namespace) -> None:
    """--num-steps-per-rollout and --global-batch-size each give the other; a step divides over ranks, then
    minibatches, then micro-batches."""
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    if args.num_steps_per_rollout is not None:
        if samples % args.num_steps_per_rollout:
            raise ConfigError(
                f"--num-steps-per-rollout: expected a divisor of the {samples} samples of a rollout, "
                f"got {args.num_steps_per_rollout}"
            )
        implied = samples // args.num_steps_per_rollout
        if args.global_batch_size not in (None, implied):
            raise ConfigError(
                f"--global-batch-size: expected {implied}, which --num-steps-per-rollout "
                f"{args.num_steps_per_rollout} implies, got {args.global_batch_size}: give one of both"
            )
        args.global_batch_size = implied
    _fill(args, "global_batch_size", samples)
    if samples % args.global_batch_size:
        raise ConfigError(
            f"--global-batch-size: expected a divisor of the {samples} samples of a rollout "
            f"(--rollout-batch-size x --n-samples-per-prompt), got {args.global_batch_size}"
        )
    args.num_steps_per_rollout = samples // args.global_batch_size
    ranks, parts = args.data_parallel_size, args.ppo_n_minibatches
    _divide("--global-batch-size", args.global_batch_size, ranks, "data-parallel ranks")
    local = args.global_batch_size // ranks
    _divide("--ppo-n-minibatches: samples of a step on a rank", local, parts, "minibatches")
    _divide("--micro-batch-size: samples of a minibatch", local // parts, args.micro_batch_size, "a pass")


def _divide(where: str, total: int, parts: int, of_what: str) -> None:
    if total % parts:
        raise ConfigError(f"{where}: expected a multiple of {parts} ({of_what}), got {total}")


def _loss(args: argparse.Namespace) -> None:
    _fill(args, "eps_clip_high", args.eps_clip)
    if args.use_tis:
        _fill(args, "custom_tis_function_path", VANILLA)
    if args.n_samples_per_prompt == 1:
        args.grpo_std_normalization = False
    if args.advantage_estimator == "cispo" and args.eps_clip < 1.0:
        args.notes.append(
            f"--eps-clip {args.eps_clip}: CISPO usually has no lower bound; --eps-clip 1.0 drops it"
        )


def _evaluation(args: argparse.Namespace) -> None:
    """Pairs of name and path as `eval_datasets`, and the evaluation's own sampling values."""
    words = args.eval_prompt_data or []
    if len(words) % 2:
        raise ConfigError(f"--eval-prompt-data: expected pairs of name and path, got {' '.join(words)}")
    args.eval_datasets = list(zip(words[::2], words[1::2], strict=True))
    if len(names := words[::2]) != len(set(names)):
        raise ConfigError(f"--eval-prompt-data: expected each name once, got {' '.join(names)}")
    _fill(args, "eval_temperature", args.rollout_temperature)
    _fill(args, "eval_max_response_len", args.rollout_max_response_len)


def _engine(args: argparse.Namespace) -> None:
    half = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
    args.params_dtype = half or args.params_dtype
    if args.sglang_dtype == "auto":
        args.sglang_dtype = half or "float32"
    _fill(args, "rollout_stop_token_ids", [])
    for dest, whole in {"rollout_top_p": 1.0, "rollout_top_k": -1}.items():
        if (value := getattr(args, dest)) != whole:
            args.notes.append(
                f"{flag_of(dest)} {value:g}: SGLang draws from a part of the distribution whose log-probs it "
                "records, so no ratio shows that difference and no correction mends it"
            )


def _output(args: argparse.Namespace) -> None:
    """`run_path`, and below it what the flags did not put elsewhere. Creates nothing."""
    args.run_path = str(_run_path(args))
    args.run_name = Path(args.run_path).name
    _fill(args, "save", f"{args.run_path}/checkpoints")
    args.tensorboard_dir = f"{args.run_path}/tensorboard"
    args.dump_details = None if args.no_dump_details else args.run_path
    for kind in ("rollout", "train"):
        template = f"{args.run_path}/{kind}_data/{{rollout_id}}.pt"
        setattr(args, f"save_debug_{kind}_data", template if args.dump_details else None)


def _run_path(args: argparse.Namespace) -> Path:
    """The named run; else the run that --load continues; else a new one after the --config file's name."""
    runs = Path(args.run_dir)
    if args.run_name:
        if args.run_name != Path(args.run_name).name or args.run_name == "..":
            raise ConfigError(f"--run-name: expected one name below --run-dir, got '{args.run_name}'")
        return runs / args.run_name
    load = Path(args.load or "").resolve()
    if args.load and load.name == "checkpoints" and load.parent.parent == runs.resolve():
        return runs / load.parent.name
    stem = Path(args.config).stem if args.config else "run"
    names = [entry.name for entry in runs.iterdir()] if runs.is_dir() else []
    taken = [int(m[1] or 1) for n in names if (m := re.fullmatch(rf"{re.escape(stem)}(?:-(\d+))?", n))]
    return runs / (f"{stem}-{max(taken) + 1}" if taken else stem)


def _schedule(args: argparse.Namespace) -> None:
    """train_iters, the optimizer steps of the run; the warm-up ends before the decay does."""
    args.train_iters = args.num_rollout * args.num_steps_per_rollout
    args.lr_decay_iters = args.lr_decay_iters or args.train_iters
    if args.lr_warmup_iters >= args.lr_decay_iters:
        raise ConfigError(
            f"--lr-warmup-iters: expected fewer than the {args.lr_decay_iters} steps of --lr-decay-iters, "
            f"got {args.lr_warmup_iters}"
        )
    if args.min_lr > args.lr:
        raise ConfigError(f"--min-lr: expected at most --lr {args.lr}, got {args.min_lr}")


def _check_combinations(args: argparse.Namespace) -> None:
    """Flags that exclude or need each other, where `slime_ext.host.flags` has no such rule."""
    if args.eps_clip_c is not None and args.advantage_estimator == "cispo":
        raise ConfigError("--eps-clip-c: expected --advantage-estimator grpo or gspo beside it, got cispo")
    if args.rollout_top_k == 0:
        raise ConfigError("--rollout-top-k: expected -1 or at least 1, got 0")
    if args.bf16 and args.fp16:
        raise ConfigError("--bf16: expected no --fp16 beside it, got both")
