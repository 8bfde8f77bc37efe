"""Defines how the hosts parse the arguments that our rules read, and checks each value.

slime sets the keys of --custom-config-path after it has parsed and checked its flags, so a value of any kind
can arrive here.
"""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from slime_ext.errors import ConfigError, cut, did_you_mean, quoted
from slime_ext.hosts import contract
from slime_ext.hosts.contract import flag_of
from slime_ext.hosts.estimators import ESTIMATORS

# These arguments decide whether slime_ext runs. Hosts silently ignore a misspelt one.
DECISIVE = (
    *contract.OURS,
    *("custom_tis_function_path", "custom_config_path", "use_tis", "get_mismatch_metrics", "tis_clip_low"),
)
ALIKE = (
    *contract.FUNCTIONS,
    "custom_agent_function_path",
)  # arguments of slime and miles that look like ours
NEARLY = 0.85  # a flag that is at least this similar to one of ours (difflib's ratio) is a misspelling of it
DASH = re.compile("[-\u2010-\u2015\u2212]")  # the hyphen, and what editors and web pages write in its place
SHORTEST = 8  # letters of a shortened name; fewer do not tell which name is meant


def _is_number(value: Any) -> bool:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and (abs(value) <= sys.float_info.max or value in (math.inf, -math.inf))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@dataclass(frozen=True)
class Kind:
    """Defines what an argument's value must be.

    Values from a file are as YAML reads them: 1e-4 is text. A quoted "false" is text, too, and Python counts
    it as true.
    """

    expected: str  # for the error message
    fits: Callable[[Any], bool]
    parse: Callable[[str], Any] | None  # text of the command line -> the value; None for a switch


@dataclass(frozen=True)
class Argument:
    """Describes how every host (slime since v0.2.0, and miles) parses an argument."""

    kind: Kind
    default: Any = None
    switched_off_by: str = ""  # for a switch that is on by default: the flag that turns it off
    choices: tuple[str, ...] = ()  # every value that some release takes; a fork can have more


NUMBER = Kind("a number (YAML reads 1e-4 as text; write 1.0e-4)", _is_number, float)
COUNT = Kind("a whole number above 0", _is_count, int)
SWITCH = Kind("true or false", lambda value: value in (True, False), None)
TEXT = Kind("text", lambda value: isinstance(value, str), str)
PATH = Kind("a path", lambda value: isinstance(value, str), str)
FUNCTION = Kind("package.module.function", lambda value: isinstance(value, str), str)
DERIVED = Kind("a value", lambda value: True, None)  # no flag sets it: the host derives it from others

GENERATE = "custom_generate_function_path"
# Every argument that a rule reads (slime_ext/rules). ``slime-ext check`` reads exactly these from a launch
# script, and a rule fails if it reads any other.
ARGUMENTS: dict[str, Argument] = {
    "eps_clip": Argument(NUMBER, 0.2),
    "tis_clip": Argument(NUMBER, 2.0),
    "tis_clip_low": Argument(NUMBER, 0),
    "rollout_temperature": Argument(NUMBER, 1.0),
    "kl_coef": Argument(NUMBER, 0.0),
    "n_samples_per_prompt": Argument(COUNT, 1),
    "score_centering_top_k": Argument(COUNT, 128),
    "rollout_top_p": Argument(NUMBER, 1.0),
    "rollout_top_k": Argument(NUMBER, -1),
    "advantage_estimator": Argument(TEXT, "grpo", choices=ESTIMATORS),
    "loss_type": Argument(TEXT, "policy_loss", choices=("policy_loss", "sft_loss", "custom_loss")),
    "train_backend": Argument(TEXT, "megatron", choices=("megatron", "fsdp")),
    "pg_loss_type": Argument(TEXT, choices=("ppo", "reinforce")),
    "flush_cache_interval": Argument(NUMBER, 1),
    "pause_generation_mode": Argument(TEXT, "retract", choices=("abort", "retract", "in_place")),
    "rollout_data_transport": Argument(TEXT, "object-store", choices=("object-store", "nixl", "straw")),
    "custom_config_path": Argument(PATH),
    "rollout_function_path": Argument(TEXT),
    "sglang_preferred_sampling_params": Argument(TEXT),
    "sglang_router_ip": Argument(TEXT),
    "hf_checkpoint": Argument(PATH),
    "rewards_normalization": Argument(SWITCH, True, "--disable-rewards-normalization"),
    "check_for_nan_in_loss_and_grad": Argument(SWITCH, True, "--no-check-for-nan-in-loss-and-grad"),
    "use_critic": Argument(DERIVED),
    "indep_dp": Argument(DERIVED),
}
ARGUMENTS |= dict.fromkeys(("eps_clip_high", "eps_clip_c"), Argument(NUMBER))
ARGUMENTS |= dict.fromkeys(
    ("num_steps_per_rollout", "global_batch_size", "rollout_batch_size", "rollout_max_response_len"),
    Argument(COUNT),
)
ARGUMENTS |= dict.fromkeys(("custom_tis_function_path", GENERATE, *contract.FUNCTIONS), Argument(FUNCTION))
ARGUMENTS |= dict.fromkeys(
    "use_tis get_mismatch_metrics use_rollout_logprobs keep_old_actor use_opsm normalize_advantages use_opd "
    "use_dynamic_global_batch_size use_rollout_routing_replay use_routing_replay use_score_centering "
    "use_sampling_support_replay use_slime_router use_miles_router sglang_enable_deterministic_inference "
    "release_train allgather_cp dynamic_context_parallel skip_actor_forward_only".split(),
    Argument(SWITCH, False),
)


def check_kinds(args: Any, unknown: Collection[str] = ()) -> None:
    """Raises ConfigError if an argument's value is not of its kind. Skips ``unknown`` arguments."""
    for name, argument in ARGUMENTS.items():
        value = getattr(args, name, None)
        if value is not None and name not in unknown and not argument.kind.fits(value):
            raise ConfigError(f"{flag_of(name)}: expected {argument.kind.expected}, got {quoted(value)}")


def check_keys(path: str, keys: Iterable[str]) -> None:
    """Raises ConfigError for a misspelt key of the file at ``path``, which slime would ignore."""
    for key in keys:
        if key != "slime_ext" and (near := did_you_mean(key, ["slime_ext"])):
            raise ConfigError(f"{path}: expected the key slime_ext, got {cut(key)}{near}")
        forbid_misspelt(path, key)


def forbid_misspelt(path: str, name: str) -> None:
    """Refuses a misspelt flag or key that decides whether slime_ext runs.

    For any flag or key that is read here, also refuses dashes in place of underscores, and the reverse.

    Raises:
        ConfigError: the name is misspelt; the message has the right name.
    """
    as_flag = name.startswith("--")
    dest = name.removeprefix("--").replace("-", "_").lower()
    known = dest in ARGUMENTS or dest in ALIKE
    near = [dest] if known else _meant(dest, is_flag=as_flag)
    for right in (flag_of(near_name) if as_flag else near_name for near_name in near):
        if name != right:
            raise ConfigError(
                f"{path}: expected {right}, got {cut(name)}: slime ignores a name it does not know"
            )


def _meant(dest: str, *, is_flag: bool) -> list[str]:
    """Returns a list with the decisive name that another name resembles; empty if there is none.

    A flag may also be the beginning of one name alone: Megatron's parser takes no shortened flags. A key may
    not, because a user's own key can be short.
    """
    near = difflib.get_close_matches(dest, DECISIVE, n=1, cutoff=NEARLY)
    if near or not is_flag or len(dest) < SHORTEST:
        return near
    whole = [name for name in {*ARGUMENTS, *ALIKE, *DECISIVE} if name.startswith(dest)]
    return whole if len(whole) == 1 and whole[0] in DECISIVE else []


def check_command_line(words: Iterable[str], args: Any) -> None:
    """Raises ConfigError for a misspelt or shortened flag that would switch slime_ext on.

    Hosts ignore unknown flags and Megatron's parser takes no abbreviations, so the typo would be silent.
    Flags that ``args`` has are skipped, and so are words without dashes, which are values. A right flag that
    the host lacks is for the rule ``flag_unknown_to_host``.
    """
    for flag in (word.partition("=")[0] for word in words if DASH.match(word)):
        dest = DASH.sub("_", flag.removeprefix("--"))
        if flag == flag_of(dest) and hasattr(args, dest):
            continue
        for right in map(flag_of, _meant(dest, is_flag=flag.startswith("--"))):
            if flag != right:
                raise ConfigError(
                    f"{flag}: expected {right}, got a flag that the host ignores: write {right}"
                )
