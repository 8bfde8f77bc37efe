"""Values that follow from other flags, in slime's order. No file but the run's own names is looked at."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from slime_ext.errors import ConfigError
from slime_ext.host.functions import flag_of

SURROGATE_OF = {"grpo": "ppo_clip", "gspo": "gspo", "cispo": "cispo"}
VANILLA = "slime_ext.tis.vanilla_tis_function"
EVAL_DEFAULTS = {
    "eval_reward_key": "reward_key",
    "eval_input_key": "input_key",
    "eval_label_key": "label_key",
    "eval_temperature": "rollout_temperature",
    "eval_top_p": "rollout_top_p",
    "eval_top_k": "rollout_top_k",
    "eval_max_response_len": "rollout_max_response_len",
}


def resolve(args: argparse.Namespace) -> argparse.Namespace:
    """Fills what was left open; changes nothing that was given.

    Raises:
        ConfigError: two flags that contradict each other.
    """
    _ranks(args)
    _steps(args)
    _loss(args)
    _evaluation(args)
    _engine(args)
    _output(args)
    return args


def _fill(args: argparse.Namespace, name: str, value: object) -> None:
    if getattr(args, name, None) is None:
        setattr(args, name, value)


def _ranks(args: argparse.Namespace) -> None:
    """World size and data-parallel size; 0 data-parallel ranks is left for validation to refuse."""
    sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size)
    for name, size in zip(("tensor-model", "pipeline-model", "context"), sizes, strict=True):
        if size < 1:
            raise ConfigError(f"--{name}-parallel-size: expected at least 1, got {size}")
    model_ranks = sizes[0] * sizes[1] * sizes[2]
    _fill(args, "actor_num_gpus_per_node", model_ranks)
    args.world_size = args.actor_num_nodes * args.actor_num_gpus_per_node
    args.data_parallel_size = args.world_size // model_ranks


def _steps(args: argparse.Namespace) -> None:
    """--num-steps-per-rollout and --global-batch-size each give the other."""
    for dest in ("rollout_batch_size", "n_samples_per_prompt"):
        if (count := getattr(args, dest)) < 1:
            raise ConfigError(f"{flag_of(dest)}: expected at least 1, got {count}")
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    if args.num_steps_per_rollout is not None:
        if args.num_steps_per_rollout < 1 or samples % args.num_steps_per_rollout:
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
    if args.global_batch_size < 1 or samples % args.global_batch_size:
        raise ConfigError(
            f"--global-batch-size: expected a divisor of the {samples} samples of a rollout "
            f"(--rollout-batch-size x --n-samples-per-prompt), got {args.global_batch_size}"
        )
    args.num_steps_per_rollout = samples // args.global_batch_size


def _loss(args: argparse.Namespace) -> None:
    _fill(args, "eps_clip_high", args.eps_clip)
    if args.eps_clip_c is not None and args.advantage_estimator == "grpo":
        _fill(args, "policy_loss", "dual_clip")  # in slime the bound alone switches it on
    _fill(args, "policy_loss", SURROGATE_OF[args.advantage_estimator])
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
    for name, source in EVAL_DEFAULTS.items():
        _fill(args, name, getattr(args, source))
    if args.rollout_max_context_len is not None:
        _fill(args, "rollout_max_prompt_len", args.rollout_max_context_len - 1)


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
    if not args.no_dump_details:
        _fill(args, "dump_details", args.run_path)
        _fill(args, "save_debug_rollout_data", f"{args.dump_details}/rollout_data/{{rollout_id}}.pt")
        _fill(args, "save_debug_train_data", f"{args.dump_details}/train_data/{{rollout_id}}.pt")
    tensorboard = Path(args.tb_project_name or f"{args.run_path}/tensorboard")
    args.tensorboard_dir = str(
        tensorboard / args.tb_experiment_name if args.tb_experiment_name else tensorboard
    )


def _run_path(args: argparse.Namespace) -> Path:
    """The named run; else the run that --load continues; else a new one after the --config file's name."""
    runs = Path(args.run_dir)
    if args.run_name:
        if args.run_name != Path(args.run_name).name or args.run_name == "..":
            raise ConfigError(f"--run-name: expected one name below --run-dir, got '{args.run_name}'")
        return runs / args.run_name
    if args.load and _is_of_a_run(Path(args.load).resolve(), runs):
        return runs / Path(args.load).resolve().parent.name
    stem = Path(args.config).stem if args.config else "run"
    taken = [int(m[1] or 1) for p in _names(runs) if (m := re.fullmatch(rf"{re.escape(stem)}(?:-(\d+))?", p))]
    return runs / (f"{stem}-{max(taken) + 1}" if taken else stem)


def _is_of_a_run(load: Path, runs: Path) -> bool:
    return load.name == "checkpoints" and load.parent.parent == runs.resolve()


def _names(directory: Path) -> list[str]:
    return [entry.name for entry in directory.iterdir()] if directory.is_dir() else []
