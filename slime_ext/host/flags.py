"""Rules between the host's flags: those that a correction needs, and slime's own that a file goes around.

slime asserts on its flags first and sets the keys of --custom-config-path afterwards; whatever it derives
from a flag or forbids beside it no longer holds for a key of that file. A rule looks only at arguments that
the host has.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from slime_ext.errors import ConfigError
from slime_ext.host import contract
from slime_ext.host.functions import flag_of
from slime_ext.optional_args import OptionalArgs, steps_per_rollout

# What decides whether anything of ours runs; hosts pass over a misspelling of it without a word.
DECISIVE = (
    *contract.OURS,
    *("custom_tis_function_path", "custom_config_path", "use_tis", "get_mismatch_metrics", "tis_clip_low"),
)
NEARLY = 0.85  # likeness from which a name is a misspelling of another
AFTERWARDS = "a key of --custom-config-path comes after slime has read it; give it as a flag"


@dataclass(frozen=True)
class Rule:
    """One line of refusal, in which ``{a.<dest>}`` is the value of an argument, and what it refuses."""

    line: str
    is_broken: Callable[[Any], Any]


def _is_number(value: Any) -> bool:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and (abs(value) <= sys.float_info.max or value in (math.inf, -math.inf))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# What ours read -> what they must be, and a test for it. A file's keys reach them as YAML has them: 1e-4 is
# text there, and so is "false", which switches on.
KINDS = {
    "a number (YAML reads 1e-4 as text; write 1.0e-4)": (
        _is_number,
        (
            "eps_clip",
            "eps_clip_high",
            "tis_clip",
            "tis_clip_low",
            "rollout_temperature",
            "kl_coef",
            "kl_loss_coef",
        ),
    ),
    "a whole number above 0": (
        _is_count,
        (
            "num_steps_per_rollout",
            "global_batch_size",
            "rollout_batch_size",
            "n_samples_per_prompt",
            "over_sampling_batch_size",
        ),
    ),
    "true or false": (
        lambda value: value in (True, False),
        (
            "use_tis",
            "get_mismatch_metrics",
            "use_rollout_logprobs",
            "keep_old_actor",
            "use_opsm",
            "calculate_per_token_loss",
            "normalize_advantages",
            "use_critic",
            "grpo_std_normalization",
            "use_dynamic_batch_size",
            "balance_by_flops",
            "debug_rollout_only",
            "debug_train_only",
            "enable_mtp_training",
            "use_rollout_routing_replay",
            "use_routing_replay",
            "use_opd",
        ),
    ),
    "a path": (lambda value: isinstance(value, str), ("custom_config_path",)),
    "package.module.function": (
        lambda value: isinstance(value, str),
        ("custom_tis_function_path", *contract.CALLS),
    ),
}
# What a band must be for the functions that read it from flags, as native steps have it.
BANDS = (
    Rule(
        "--tis-clip: expected more than --tis-clip-low {a.tis_clip_low}, got {a.tis_clip}: every weight "
        "would be the same",
        lambda a: (
            _reads_band(a) and None not in (a.tis_clip, a.tis_clip_low) and a.tis_clip <= a.tis_clip_low
        ),
    ),
    Rule(
        "--tis-clip: expected at least 1, got {a.tis_clip}: on-policy tokens must keep their weight",
        lambda a: _reads_band(a) and a.tis_clip is not None and a.tis_clip < 1,
    ),
    Rule(
        "--tis-clip-low: expected at most 1, got {a.tis_clip_low}: on-policy tokens must keep their weight",
        lambda a: _reads_band(a) and (a.tis_clip_low or 0) > 1,
    ),
    Rule(
        "--eps-clip: expected at least 0, got {a.eps_clip}: on-policy tokens must keep their weight",
        lambda a: _reads_range(a) and (a.eps_clip or 0) < 0,
    ),
    Rule(
        "--eps-clip-high: expected at least 0, got {a.eps_clip_high}: on-policy tokens must keep "
        "their weight",
        lambda a: _reads_range(a) and (a.eps_clip_high or 0) < 0,
    ),
    Rule(
        "--eps-clip: expected a number above 0, got {a.eps_clip}: every weight would be the same",
        lambda a: _reads_range(a) and a.eps_clip == 0 and not a.eps_clip_high,
    ),
)
# What the hook itself needs: also what ``slime-ext check`` looks for.
HOOK = (
    Rule(
        "--use-rollout-logprobs: expected off beside --use-tis, got on: the ratio would be counted twice",
        lambda a: a.use_tis and a.use_rollout_logprobs,
    ),
    Rule(
        "--use-tis: expected on beside --custom-tis-function-path, got off: the function would never be "
        "called; for metrics alone set --get-mismatch-metrics",
        lambda a: a.custom_tis_function_path and not (a.use_tis or a.get_mismatch_metrics),
    ),
    Rule(
        "--custom-tis-function-path: expected a function beside --get-mismatch-metrics, got none: slime has "
        "no function of its own for it",
        lambda a: a.get_mismatch_metrics and not a.custom_tis_function_path,
    ),
    Rule(
        "--loss-type: expected policy_loss beside --custom-tis-function-path, got {a.loss_type}: it never "
        "calls that function",
        lambda a: a.custom_tis_function_path and a.loss_type == "sft_loss",
    ),
    *BANDS,
)
# slime/utils/arguments.py, slime_validate_args: what it asserts or derives before it merges the file.
BEFORE_THE_MERGE = (
    Rule(
        "--rollout-temperature: expected a number above 0, got {a.rollout_temperature}: greedy decoding has "
        "no probabilities to correct",
        lambda a: a.rollout_temperature is not None and a.rollout_temperature <= 0,
    ),
    Rule(
        "--kl-coef: expected 0 beside --kl-loss-coef, got {a.kl_coef}: the reference counts once",
        lambda a: a.kl_coef and a.kl_loss_coef,
    ),
    Rule(
        "--normalize-advantages: expected on with --advantage-estimator {a.advantage_estimator}, got off: "
        "REINFORCE++ needs it",
        lambda a: (
            a.advantage_estimator in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
            and a.normalize_advantages is False
        ),
    ),
    Rule(
        f"--advantage-estimator: expected another than ppo without a critic, got ppo: {AFTERWARDS}",
        lambda a: a.advantage_estimator == "ppo" and a.use_critic is False,
    ),
    Rule(
        f"--disable-grpo-std-normalization: expected on with --n-samples-per-prompt 1, got off: {AFTERWARDS}",
        # miles' adapters have numbers of samples of their own.
        lambda a: a.n_samples_per_prompt == 1 and a.grpo_std_normalization and not a.multi_lora,
    ),
    Rule(
        "--max-tokens-per-gpu: expected a number with --use-dynamic-batch-size, got none: it bounds a "
        "micro-batch",
        lambda a: a.use_dynamic_batch_size and a.max_tokens_per_gpu is None,
    ),
    Rule(
        "--balance-by-flops: expected --use-dynamic-batch-size beside it, got none: it cuts micro-batches",
        lambda a: a.balance_by_flops and not a.use_dynamic_batch_size,
    ),
    Rule(
        f"--global-batch-size: expected rollout batch size x samples per prompt / "
        f"--num-steps-per-rollout, got {{a.global_batch_size}}: {AFTERWARDS}",
        lambda a: _steps_disagree(a),
    ),
    Rule(
        "--over-sampling-batch-size: expected at least --rollout-batch-size {a.rollout_batch_size}, got "
        "{a.over_sampling_batch_size}: a rollout would never be full",
        lambda a: (a.over_sampling_batch_size or a.rollout_batch_size or 0) < (a.rollout_batch_size or 0),
    ),
    Rule(
        "--save-debug-train-data: expected another path than --save-debug-rollout-data, got "
        "{a.save_debug_train_data}: one would overwrite the other",
        lambda a: a.save_debug_train_data and a.save_debug_train_data == a.save_debug_rollout_data,
    ),
    Rule(
        f"--dump-details: expected the paths of the dumps beside it, got none: {AFTERWARDS}",
        lambda a: a.dump_details and not (a.save_debug_rollout_data and a.save_debug_train_data),
    ),
    Rule(
        "--debug-train-only: expected off beside --debug-rollout-only, got on: nothing would run",
        lambda a: a.debug_rollout_only and a.debug_train_only,
    ),
    Rule(
        "--save: expected a folder with --save-interval, got none: there is nowhere to save to",
        lambda a: a.save_interval is not None and a.save is None,
    ),
    Rule(
        "--eval-prompt-data: expected prompts with --eval-interval, got none: there is nothing to evaluate",
        lambda a: a.eval_interval is not None and a.eval_datasets is not None and not a.eval_datasets,
    ),
    Rule(
        "--mtp-num-layers: expected a number with --enable-mtp-training, got none: there is no such layer",
        lambda a: a.enable_mtp_training and not a.mtp_num_layers,
    ),
    Rule(
        f"--use-routing-replay: expected on with --use-rollout-routing-replay, got off: {AFTERWARDS}",
        lambda a: a.use_rollout_routing_replay and a.use_routing_replay is False,
    ),
    Rule(
        "--opd-type: expected sglang or megatron with --use-opd, got none: it says where the teacher runs",
        lambda a: a.use_opd and a.opd_type is None,
    ),
    Rule(
        "--use-opd: expected on beside --opd-teacher-load, got off: the teacher would never be asked",
        # A critic's processes have the teacher's path, too, and slime turns --use-opd off in them.
        lambda a: a.opd_teacher_load and a.use_opd is False and not a.use_critic,
    ),
)


def check_flags(args: Any, rules: tuple[Rule, ...] = (*HOOK, *BEFORE_THE_MERGE)) -> None:
    """Holds the arguments against their kinds and the rules.

    Raises:
        ConfigError: an argument of another kind, or the line of the first rule that they break.
    """
    given = OptionalArgs(args)
    for expected, (is_one, names) in KINDS.items():
        for dest in names:
            value = getattr(given, dest)
            if value is not None and not is_one(value):
                raise ConfigError(f"{flag_of(dest)}: expected {expected}, got {value!r}")
    for rule in rules:
        if rule.is_broken(given):
            raise ConfigError(rule.line.format(a=given))


def check_command_line(words: Iterable[str], args: Any) -> None:
    """Stops at a flag that is nearly one of those that decide whether ours runs: slime and miles ignore what
    their parsers do not know.

    Args:
        words: the command line that started the run.
        args: what the host made of it; a flag that it knows is none of ours misspelt.

    Raises:
        ConfigError: with the right flag.
    """
    for word in words:
        flag = word.partition("=")[0]
        dest = flag.removeprefix("--").replace("-", "_")
        if flag == dest or (flag == flag_of(dest) and hasattr(args, dest)):
            continue
        for right in map(flag_of, difflib.get_close_matches(dest, DECISIVE, n=1, cutoff=NEARLY)):
            if not right.startswith(flag):  # which argparse takes for it
                raise ConfigError(
                    f"{flag}: expected {right}, got a flag that the host ignores: correct the name"
                )


def skips_proximal(a: OptionalArgs) -> bool:
    """slime's condition for a rollout without recomputed log-probs, as far as flags decide it."""
    needed = (a.get_mismatch_metrics, a.kl_coef, a.use_rollout_logprobs, a.keep_old_actor, a.use_opd)
    others = a.use_critic or a.advantage_estimator == "gspo" or a.loss_type not in (None, "policy_loss")
    replayed = a.use_routing_replay and not a.use_rollout_routing_replay
    return steps_per_rollout(a) == 1 and not (any(needed) or others or replayed)


def _reads_band(a: Any) -> bool:
    return contract.function_of(a) in ("vanilla_tis_function", "icepop_function")


def _reads_range(a: Any) -> bool:
    return contract.function_of(a) == "off_policy_is_function"


def _steps_disagree(a: Any) -> bool:
    sizes = (a.rollout_batch_size, a.n_samples_per_prompt, a.global_batch_size, a.num_steps_per_rollout)
    return all(sizes) and sizes[0] * sizes[1] // sizes[3] != sizes[2]
