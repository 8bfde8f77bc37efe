"""Numbers against their ranges, against each other, and flags that exclude each other."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from slime_ext.errors import ConfigError
from slime_ext.host.functions import flag_of

Range = tuple[str, Callable[[Any], bool]]
POSITIVE: Range = ("a number above 0", lambda x: x > 0)
NOT_NEGATIVE: Range = ("0 or more", lambda x: x >= 0)
AT_LEAST_ONE: Range = ("at least 1", lambda x: x >= 1)
SHARE: Range = ("a number above 0, at most 1", lambda x: 0 < x <= 1)
BETA: Range = ("a number in [0, 1)", lambda x: 0 <= x < 1)
TOP_K: Range = ("-1 or at least 1", lambda x: x == -1 or x >= 1)
SEED: Range = ("a number in [0, 2^32)", lambda x: 0 <= x < 2**32)
PORT: Range = ("a port between 1 and 65535", lambda x: 1 <= x <= 65535)

RANGES: dict[str, Range] = {
    "actor_num_gpus_per_node": AT_LEAST_ONE,
    "distributed_timeout_minutes": AT_LEAST_ONE,
    "num_rollout": AT_LEAST_ONE,
    "num_epoch": AT_LEAST_ONE,
    "seed": SEED,
    "rollout_seed": SEED,
    "rollout_batch_size": AT_LEAST_ONE,
    "n_samples_per_prompt": AT_LEAST_ONE,
    "n_samples_per_eval_prompt": AT_LEAST_ONE,
    "rollout_temperature": POSITIVE,
    "rollout_top_p": SHARE,
    "rollout_top_k": TOP_K,
    "rollout_max_response_len": AT_LEAST_ONE,
    "rollout_max_prompt_len": AT_LEAST_ONE,
    "rollout_max_context_len": AT_LEAST_ONE,
    "update_weights_interval": AT_LEAST_ONE,
    "eval_interval": AT_LEAST_ONE,
    "eval_temperature": NOT_NEGATIVE,
    "eval_top_p": SHARE,
    "eval_top_k": TOP_K,
    "eval_max_response_len": AT_LEAST_ONE,
    "micro_batch_size": AT_LEAST_ONE,
    "max_tokens_per_gpu": AT_LEAST_ONE,
    "ppo_n_minibatches": AT_LEAST_ONE,
    "eps_clip": ("a number in [0, 1]; 1 drops the lower bound", lambda x: 0 <= x <= 1),
    "eps_clip_high": NOT_NEGATIVE,
    "eps_clip_c": ("a number above 1", lambda x: x > 1),
    "sapo_tau_pos": POSITIVE,
    "sapo_tau_neg": POSITIVE,
    "entropy_coef": NOT_NEGATIVE,
    "tis_clip": POSITIVE,
    "tis_clip_low": NOT_NEGATIVE,
    "lr": NOT_NEGATIVE,
    "min_lr": NOT_NEGATIVE,
    "lr_warmup_iters": NOT_NEGATIVE,
    "lr_decay_iters": AT_LEAST_ONE,
    "weight_decay": NOT_NEGATIVE,
    "adam_beta1": BETA,
    "adam_beta2": BETA,
    "adam_eps": POSITIVE,
    "clip_grad": NOT_NEGATIVE,
    "init_method_std": POSITIVE,
    "sglang_port": PORT,
    "sglang_server_concurrency": AT_LEAST_ONE,
    "sglang_context_length": AT_LEAST_ONE,
    "sglang_max_total_tokens": AT_LEAST_ONE,
    "sglang_max_running_requests": AT_LEAST_ONE,
    "sglang_mem_fraction_static": SHARE,
    "sglang_request_timeout": POSITIVE,
    "sglang_start_timeout": POSITIVE,
    "sglang_max_restarts": NOT_NEGATIVE,
    "save_interval": AT_LEAST_ONE,
    "save_keep": NOT_NEGATIVE,
}


def check_ranges(args: argparse.Namespace) -> None:
    """Every number that is given lies in its range; --tis-clip-low below --tis-clip."""
    for dest, (wanted, fits) in RANGES.items():
        value = getattr(args, dest)
        if value is not None and not fits(value):
            raise ConfigError(f"{flag_of(dest)}: expected {wanted}, got {value}")
    if args.tis_clip_low > args.tis_clip:
        raise ConfigError(
            f"--tis-clip-low: expected at most --tis-clip {args.tis_clip}, got {args.tis_clip_low}"
        )
    if args.min_lr > args.lr:
        raise ConfigError(f"--min-lr: expected at most --lr {args.lr}, got {args.min_lr}")


def check_ranks(args: argparse.Namespace) -> None:
    """The training ranks are a multiple of those that one copy of the model takes."""
    if args.actor_num_nodes != 1:
        raise ConfigError(
            f"--actor-num-nodes: expected 1, got {args.actor_num_nodes}: this launcher runs on one machine"
        )
    sizes = [args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size]
    model_ranks = sizes[0] * sizes[1] * sizes[2]
    if args.world_size % model_ranks:
        shape = " x ".join(map(str, sizes))
        raise ConfigError(
            f"--actor-num-gpus-per-node: expected a multiple of {model_ranks} (tensor x pipeline x context = "
            f"{shape}), got {args.actor_num_gpus_per_node}"
        )


def check_batches(args: argparse.Namespace) -> None:
    """An optimizer step divides over ranks, then over minibatches, then over micro-batches."""
    ranks, parts = args.data_parallel_size, args.ppo_n_minibatches
    _divide("--global-batch-size", args.global_batch_size, ranks, "data-parallel ranks")
    local = args.global_batch_size // ranks
    _divide("--ppo-n-minibatches: samples of a step on a rank", local, parts, "minibatches")
    if args.use_dynamic_batch_size:
        if args.max_tokens_per_gpu is None:
            raise ConfigError(
                "--max-tokens-per-gpu: expected a number with --use-dynamic-batch-size, got nothing"
            )
        return
    _divide(
        "--micro-batch-size: samples of a minibatch",
        local // parts,
        args.micro_batch_size,
        "a micro-batch each",
    )


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


def check_combinations(args: argparse.Namespace) -> None:
    """Flags that exclude or need each other: the first rule that is broken is named."""
    for broken, message in (*_correction_rules(args), *_other_rules(args)):
        if broken:
            raise ConfigError(message)
    _check_templates(args)


def _correction_rules(args: argparse.Namespace) -> list[tuple[bool, str]]:
    """slime's assertions on the correction, and the calls that it would leave out in silence."""
    named = args.custom_tis_function_path is not None
    return [
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
    ]


def _other_rules(args: argparse.Namespace) -> list[tuple[bool, str]]:
    dual, prompt, context = (
        args.policy_loss == "dual_clip",
        args.rollout_max_prompt_len,
        args.rollout_max_context_len,
    )
    train_dump, rollout_dump = args.save_debug_train_data, args.save_debug_rollout_data
    return [
        (not (args.num_rollout or args.num_epoch), "--num-rollout: expected it or --num-epoch, got neither"),
        (
            bool(args.eval_interval) and not args.eval_datasets,
            "--eval-interval: expected --eval-prompt-data beside it, got none",
        ),
        (args.bf16 and args.fp16, "--bf16: expected no --fp16 beside it, got both"),
        (
            args.eps_clip_c is not None and not dual,
            f"--eps-clip-c: expected --policy-loss dual_clip beside it, got {args.policy_loss}",
        ),
        (
            dual and args.eps_clip_c is None,
            "--policy-loss dual_clip: expected --eps-clip-c beside it, got none",
        ),
        (
            None not in (args.sglang_server_url, args.sglang_port),
            "--sglang-port: expected no --sglang-server-url beside it, got both: no server is started",
        ),
        (
            train_dump is not None and train_dump == rollout_dump,
            "--save-debug-train-data: expected another path than --save-debug-rollout-data, got the same",
        ),
        (
            None not in (prompt, context) and prompt >= context,
            f"--rollout-max-prompt-len: expected less than --rollout-max-context-len {context}, got {prompt}",
        ),
    ]


def _check_templates(args: argparse.Namespace) -> None:
    for dest in ("save_debug_rollout_data", "save_debug_train_data"):
        template = getattr(args, dest)
        if template is not None and ("{rollout_id}" not in template or not _formats(template, dest)):
            raise ConfigError(f"{flag_of(dest)}: expected a path with {{rollout_id}}, got {template}")


def _formats(template: str, dest: str) -> bool:
    names = {"rollout_id": 0} | ({"rank": 0} if dest == "save_debug_train_data" else {})
    try:
        template.format(**names)
    except (KeyError, ValueError, IndexError, AttributeError):
        return False
    return True
