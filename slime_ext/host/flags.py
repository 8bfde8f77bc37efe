"""Rules between the host's flags: those that a correction needs, and slime's own that a file goes around.

slime asserts on its flags first and sets the keys of --custom-config-path afterwards; whatever it derives
from a flag or forbids beside it no longer holds for a key of that file. A rule looks only at arguments that
the host has.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from slime_ext.config.dialects.block import FLOAT32, is_float32
from slime_ext.config.optional_args import OptionalArgs, steps_per_rollout
from slime_ext.errors import ConfigError, shown
from slime_ext.host import contract
from slime_ext.host.contract import INIT_FLAG, PLAN, PLAN_FLAG, flag_of

if TYPE_CHECKING:
    from slime_ext.core.correction import Correction

# What decides whether anything of ours runs; hosts pass over a misspelling of it without a word.
DECISIVE = (
    *contract.OURS,
    *("custom_tis_function_path", "custom_config_path", "use_tis", "get_mismatch_metrics", "tis_clip_low"),
)
NEARLY = 0.85  # likeness from which a name is a misspelling of another
AFTERWARDS = "a key of --custom-config-path comes after slime has read it; give it as a flag"


# A line of refusal, in which ``{a.<dest>}`` is the value of an argument -> whether arguments deserve it.
Rules = Mapping[str, Callable[[Any], Any]]


def _is_number(value: Any) -> bool:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and (abs(value) <= sys.float_info.max or value in (math.inf, -math.inf))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@dataclass(frozen=True)
class Kind:
    """What the value of an argument must be.

    Args:
        expected: as a refusal says it.
        fits: whether a value is one. A file's keys come as YAML has them: 1e-4 is text there, and so is
            "false", which would switch on.
        parse: text of the command line -> the value; None for a switch, which takes no text.
    """

    expected: str
    fits: Callable[[Any], bool]
    parse: Callable[[str], Any] | None


@dataclass(frozen=True)
class Argument:
    """How every host parses one of its arguments: slime v0.2.0 to 624b824, and miles.

    Args:
        default: its value where no flag gives one.
        switched_off_by: the flag that makes it false, of a switch that is on by default.
    """

    kind: Kind
    default: Any = None
    switched_off_by: str = ""


NUMBER = Kind("a number (YAML reads 1e-4 as text; write 1.0e-4)", _is_number, float)
COUNT = Kind("a whole number above 0", _is_count, int)
WHOLE = Kind("a whole number", lambda value: isinstance(value, int), int)
SWITCH = Kind("true or false", lambda value: value in (True, False), None)
TEXT = Kind("text", lambda value: isinstance(value, str), str)
PATH = Kind("a path", lambda value: isinstance(value, str), str)
FUNCTION = Kind("package.module.function", lambda value: isinstance(value, str), str)
ANY = Kind("a value", lambda value: True, str)
DERIVED = Kind("a value", lambda value: True, None)  # no flag gives it: the host makes it of others

# Every argument that a rule of this file or of config/rules.py reads. ``slime-ext check`` reads exactly these
# from a launch script; a rule that reads another one fails, and so does a test.
ARGUMENTS: dict[str, Argument] = {
    "eps_clip": Argument(NUMBER, 0.2),
    "tis_clip": Argument(NUMBER, 2.0),
    "tis_clip_low": Argument(NUMBER, 0),
    "rollout_temperature": Argument(NUMBER, 1.0),
    "kl_coef": Argument(NUMBER, 0.0),
    "kl_loss_coef": Argument(NUMBER, 0.0),
    "n_samples_per_prompt": Argument(COUNT, 1),
    "advantage_estimator": Argument(TEXT, "grpo"),
    "loss_type": Argument(TEXT, "policy_loss"),
    "rewards_normalization": Argument(SWITCH, True, "--disable-rewards-normalization"),
    "grpo_std_normalization": Argument(SWITCH, True, "--disable-grpo-std-normalization"),
} | {
    name: Argument(kind)
    for kind, names in {
        NUMBER: "eps_clip_high eps_clip_c",
        COUNT: "num_steps_per_rollout global_batch_size rollout_batch_size over_sampling_batch_size",
        WHOLE: "max_tokens_per_gpu mtp_num_layers save_interval eval_interval",
        ANY: "save save_debug_rollout_data save_debug_train_data load_debug_rollout_data dump_details "
        "opd_type opd_teacher_load eval_config eval_prompt_data",
        PATH: "custom_config_path",
        FUNCTION: " ".join(("custom_tis_function_path", *contract.CALLS)),
        DERIVED: "use_critic multi_lora eval_datasets",
    }.items()
    for name in names.split()
}
ARGUMENTS |= dict.fromkeys(
    "use_tis get_mismatch_metrics use_rollout_logprobs keep_old_actor use_opsm calculate_per_token_loss "
    "normalize_advantages use_dynamic_batch_size use_dynamic_global_batch_size balance_by_flops "
    "debug_rollout_only debug_train_only enable_mtp_training use_rollout_routing_replay use_routing_replay "
    "use_opd".split(),
    Argument(SWITCH, False),
)


class _UnknownError(Exception):
    """A rule reads an argument whose value cannot be known."""


class _Arguments:
    """The arguments for a rule: those of ARGUMENTS and no others; None where the host lacks one."""

    def __init__(self, args: Any, unknown: Collection[str] = ()) -> None:
        self._args, self._unknown = args, unknown

    def __getattr__(self, name: str) -> Any:
        if name not in ARGUMENTS:
            raise KeyError(f"ARGUMENTS: expected {name}, which a rule reads, got none: add it")
        if name in self._unknown:
            raise _UnknownError(name)
        return getattr(self._args, name, None)


def _reads_band(a: Any) -> bool:
    return contract.function_of(a) in ("vanilla_tis_function", "icepop_function")


def _reads_range(a: Any) -> bool:
    return contract.function_of(a) == "off_policy_is_function"


def _is_beyond_float32(dest: str, reads: Callable[[Any], bool], a: Any) -> bool:
    value = getattr(a, dest) if reads(a) else None
    return value not in (None, math.inf) and not is_float32(value)


# What a band must be for the functions that read it from flags, as native steps have it.
BANDS: Rules = {
    "--tis-clip: expected more than --tis-clip-low {a.tis_clip_low}, got {a.tis_clip}: every weight "
    "would be the same": lambda a: (
        _reads_band(a) and None not in (a.tis_clip, a.tis_clip_low) and a.tis_clip <= a.tis_clip_low
    ),
    "--tis-clip: expected at least 1, got {a.tis_clip}: on-policy tokens must keep their weight": lambda a: (
        _reads_band(a) and a.tis_clip is not None and a.tis_clip < 1
    ),
    "--tis-clip-low: expected at most 1, got {a.tis_clip_low}: on-policy tokens must keep their "
    "weight": lambda a: _reads_band(a) and (a.tis_clip_low or 0) > 1,
    "--eps-clip: expected at least 0, got {a.eps_clip}: on-policy tokens must keep their weight": lambda a: (
        _reads_range(a) and (a.eps_clip or 0) < 0
    ),
    "--eps-clip-high: expected at least 0, got {a.eps_clip_high}: on-policy tokens must keep "
    "their weight": lambda a: _reads_range(a) and (a.eps_clip_high or 0) < 0,
    "--eps-clip: expected a number above 0, got {a.eps_clip}: every weight would be the same": lambda a: (
        _reads_range(a) and a.eps_clip == 0 and not a.eps_clip_high
    ),
    **{
        f"{flag_of(dest)}: expected {FLOAT32}, got {{a.{dest}}}": functools.partial(
            _is_beyond_float32, dest, reads
        )
        for reads, dests in ((_reads_band, contract.BAND), (_reads_range, contract.RANGE))
        for dest in dests
    },
}
# What the hook itself needs: also what ``slime-ext check`` looks for.
HOOK: Rules = {
    "--use-rollout-logprobs: cannot be combined with --use-tis: the ratio would be applied twice. Remove "
    "one.": lambda a: a.use_tis and a.use_rollout_logprobs,
    "--use-tis: expected on beside --custom-tis-function-path, got off: the function would never be "
    "called; for metrics alone set --get-mismatch-metrics": lambda a: (
        a.custom_tis_function_path and not (a.use_tis or a.get_mismatch_metrics)
    ),
    "--custom-tis-function-path: expected a function beside --get-mismatch-metrics, got none: slime has "
    "no function of its own for it": lambda a: a.get_mismatch_metrics and not a.custom_tis_function_path,
    "--loss-type: expected policy_loss beside --custom-tis-function-path, got {a.loss_type}: it never "
    "calls that function": lambda a: a.custom_tis_function_path and a.loss_type == "sft_loss",
    **BANDS,
}
# slime/utils/arguments.py, slime_validate_args: what it asserts or derives before it merges the file.
BEFORE_THE_MERGE: Rules = {
    "--rollout-temperature: expected a number above 0, got {a.rollout_temperature}: greedy decoding has "
    "no probabilities to correct": lambda a: a.rollout_temperature is not None and a.rollout_temperature <= 0,
    "--kl-coef: expected 0 beside --kl-loss-coef, got {a.kl_coef}: the reference counts once": lambda a: (
        a.kl_coef and a.kl_loss_coef
    ),
    "--normalize-advantages: expected on with --advantage-estimator {a.advantage_estimator}, got off: "
    "REINFORCE++ needs it": lambda a: (
        a.advantage_estimator in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
        and a.normalize_advantages is False
    ),
    f"--advantage-estimator: expected another than ppo without a critic, got ppo: {AFTERWARDS}": lambda a: (
        a.advantage_estimator == "ppo" and a.use_critic is False
    ),
    # miles' adapters have numbers of samples of their own.
    "--disable-grpo-std-normalization: expected on with --n-samples-per-prompt 1, got off: "
    f"{AFTERWARDS}": lambda a: a.n_samples_per_prompt == 1 and a.grpo_std_normalization and not a.multi_lora,
    "--max-tokens-per-gpu: expected a number with --use-dynamic-batch-size, got none: it bounds a "
    "micro-batch": lambda a: a.use_dynamic_batch_size and a.max_tokens_per_gpu is None,
    "--balance-by-flops: expected --use-dynamic-batch-size beside it, got none: it cuts "
    "micro-batches": lambda a: a.balance_by_flops and not a.use_dynamic_batch_size,
    "--global-batch-size: expected --rollout-batch-size {a.rollout_batch_size} x --n-samples-per-prompt "
    "{a.n_samples_per_prompt} / --num-steps-per-rollout {a.num_steps_per_rollout}, got {a.global_batch_size}"
    ": slime works it out where no flag gives it": lambda a: _steps_disagree(a),
    "--over-sampling-batch-size: expected at least --rollout-batch-size {a.rollout_batch_size}, got "
    "{a.over_sampling_batch_size}: a rollout would never be full": lambda a: (
        (a.over_sampling_batch_size or a.rollout_batch_size or 0) < (a.rollout_batch_size or 0)
    ),
    "--save-debug-train-data: expected another path than --save-debug-rollout-data, got "
    "{a.save_debug_train_data}: one would overwrite the "
    "other": lambda a: a.save_debug_train_data and a.save_debug_train_data == a.save_debug_rollout_data,
    f"--dump-details: expected the paths of the dumps beside it, got none: {AFTERWARDS}": lambda a: (
        a.dump_details and not (a.save_debug_rollout_data and a.save_debug_train_data)
    ),
    "--debug-train-only: expected off beside --debug-rollout-only, got on: nothing would run": lambda a: (
        a.debug_rollout_only and a.debug_train_only
    ),
    "--save: expected a folder with --save-interval, got none: there is nowhere to save to": lambda a: (
        a.save_interval is not None and a.save is None
    ),
    "--eval-prompt-data: expected prompts with --eval-interval, got none: there is nothing to "
    "evaluate": lambda a: a.eval_interval is not None and a.eval_datasets is not None and not a.eval_datasets,
    "--mtp-num-layers: expected a number with --enable-mtp-training, got none: there is no such "
    "layer": lambda a: a.enable_mtp_training and not a.mtp_num_layers,
    f"--use-routing-replay: expected on with --use-rollout-routing-replay, got off: {AFTERWARDS}": lambda a: (
        a.use_rollout_routing_replay and a.use_routing_replay is False
    ),
    "--opd-type: expected sglang or megatron with --use-opd, got none: it says where the teacher "
    "runs": lambda a: a.use_opd and a.opd_type is None,
    # A critic's processes have the teacher's path, too, and slime turns --use-opd off in them.
    "--use-opd: expected on beside --opd-teacher-load, got off: the teacher would never be asked": lambda a: (
        a.opd_teacher_load and a.use_opd is False and not a.use_critic
    ),
}


def check_flags(
    args: Any,
    rules: Rules = MappingProxyType({**HOOK, **BEFORE_THE_MERGE}),
    unknown: Collection[str] = (),
) -> None:
    """Holds the arguments against their kinds and the rules.

    Args:
        unknown: names of arguments whose values cannot be known; a rule that reads one is left out.

    Raises:
        ConfigError: an argument of another kind, or the line of the first rule that they break.
    """
    for name, argument in ARGUMENTS.items():
        value = getattr(args, name, None)
        if value is not None and name not in unknown and not argument.kind.fits(value):
            raise ConfigError(f"{flag_of(name)}: expected {argument.kind.expected}, got {shown(value)}")
    a = _Arguments(args, unknown)
    for line, is_broken in rules.items():
        with contextlib.suppress(_UnknownError):
            if is_broken(a):
                raise ConfigError(line.format(a=a))


def check_plan(args: Any, *, may_skip_proximal: bool) -> None:
    """Holds the arguments against what a correction needs that couples the samples of an optimizer step.

    Args:
        may_skip_proximal: whether the host does without proximal log-probs where flags allow it (slime since
            v0.3.0).

    Raises:
        ConfigError: a flag is missing.
    """
    path = getattr(args, "rollout_data_postprocess_path", None)
    if path != PLAN:
        raise ConfigError(
            f"--rollout-data-postprocess-path: expected {PLAN} with a correction that couples the "
            f"samples of an optimizer step, got {path or 'none'}: {'it takes one' if path else 'add it'}"
        )
    if may_skip_proximal and skips_proximal(OptionalArgs(args)):
        raise ConfigError(
            "--get-mismatch-metrics: expected on with a correction that couples the samples of an optimizer "
            "step, got off: with one step per rollout slime computes no proximal log-probs before it trains"
        )


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


def _steps_disagree(a: Any) -> bool:
    sizes = (a.rollout_batch_size, a.n_samples_per_prompt, a.global_batch_size, a.num_steps_per_rollout)
    return all(sizes) and sizes[0] * sizes[1] // sizes[3] != sizes[2]


FORMULAS = {  # functions with a formula of their own
    "vanilla_tis_function": "clip(proximal / behavior, {tis_clip_low}, {tis_clip})",
    "icepop_function": "proximal / behavior inside [{tis_clip_low}, {tis_clip}], else 0,",
    "off_policy_is_function": "clip(target / behavior, 1 - {eps_clip}, 1 + {eps_clip_high})",
}


def flags_of(name: str, correction: Correction) -> str:
    """The flags, all slime's own, that make a launch use the preset ``name``."""
    switch = "--use-tis" if correction.steps or correction.needs_target else "--get-mismatch-metrics"
    plan = f" --get-mismatch-metrics {PLAN_FLAG} {PLAN}" if correction.needs_plan else ""
    return f"{switch} --custom-tis-function-path slime_ext.tis.{name} {INIT_FLAG}{plan}"


def formula(name: str, args: Mapping[str, Any]) -> str:
    """What a function with a formula of its own does; the flag where the arguments do not say its number.

    >>> formula("vanilla_tis_function", {"tis_clip": 2.0})
    'weight clip(proximal / behavior, --tis-clip-low, 2) per token'
    """
    words = {dest: flag_of(dest) for dest in ("tis_clip_low", "tis_clip", "eps_clip")}
    words |= {dest: f"{args[dest]:g}" for dest in words if args.get(dest) is not None}
    high = args.get("eps_clip_high")
    words["eps_clip_high"] = words["eps_clip"] if high is None else f"{high:g}"
    return f"weight {FORMULAS[name].format(**words)} per token"


def double_count(args: Any) -> str:
    """Where off_policy_is_function counts target / proximal twice, the line that says so; else empty."""
    steps, kept = steps_per_rollout(args), getattr(args, "keep_old_actor", False)
    if not (steps > 1 or kept):
        return ""
    expected, got = ("one optimizer step per rollout", steps) if steps > 1 else ("no --keep-old-actor", "it")
    return (
        f"off_policy_is_function: expected {expected}, got {got}: the host's loss has the factor target / "
        "proximal already, so that ratio is counted twice; use slime_ext.tis.off_policy_is"
    )


def unread_clip(args: Any) -> str:
    """Where --tis-clip stands beside a function of ours that does not read it, the line that says so; else
    empty. A flag that says the host's default is not told from none."""
    a, name = OptionalArgs(args), contract.function_of(args)
    given = {dest: getattr(a, dest) for dest in ("tis_clip", "tis_clip_low")}
    given = {dest: value for dest, value in given.items() if value not in (None, ARGUMENTS[dest].default)}
    if not name or not given or _reads_band(a):
        return ""
    dest, value = next(iter(given.items()))
    return (
        f"{flag_of(dest)}: expected none beside slime_ext.tis.{name}, got {value:g}: only slime_ext.tis."
        "vanilla_tis_function and icepop_function read it; a cap of yours is truncate: {high: ...} under "
        "slime_ext.steps"
    )


def brief(steps: Sequence[Mapping[str, Any]]) -> str:
    """Steps in one line: name(field value, ...)."""
    named = [
        f"{name}({', '.join(_value(*field) for field in fields.items())})"
        for step in steps
        for name, fields in step.items()
    ]
    return " > ".join(named) or "-"


def one_line(keys: Mapping[str, Any]) -> str:
    """A correction's native keys in one line: the ratio, the loss, the steps with their numbers.

    >>> one_line({"numerator": "proximal", "surrogate": "host", "mask_scope": "policy",
    ...           "steps": [{"reweight": {"level": "token"}}, {"truncate": {"high": 2.0}}]})
    'proximal / behavior, loss host, reweight(token) > truncate(high 2), masks policy'
    """
    surrogate = keys["surrogate"]
    loss = surrogate if isinstance(surrogate, str) else brief([surrogate])
    steps = brief(keys["steps"]) if keys["steps"] else "no steps"
    more = [
        f"{key} {keys[key]}"
        for key in ("denominator", "group")
        if keys.get(key) not in (None, "host", "ignore")
    ]
    parts = (f"{keys['numerator']} / behavior", f"loss {loss}", steps, f"masks {keys['mask_scope']}", *more)
    return ", ".join(parts)


def _value(key: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{key} {value:.6g}" if isinstance(value, float) else f"{key} {value}"
