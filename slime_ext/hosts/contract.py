"""Defines slime's contract as data: the hook's arguments and a sample's weight versions.

Shapes: ``T`` local response tokens of the micro-batch, ``N`` samples, ``R_i`` full response length, ``L_i``
the part of it that this context-parallel rank holds. The contract is the same from slime v0.2.0 to 624b824.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

from slime_ext.core.importing import load_named
from slime_ext.core.needs import Need
from slime_ext.errors import ConfigError, cut, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

    from slime_ext.core.correction import Correction
    from slime_ext.core.tokens import Head, Support

REQUIRED = (
    "args",
    "pg_loss",  # [T] with grad, local
    "train_log_probs",  # N x [L_i], proximal policy
    "rollout_log_probs",  # N x [L_i], behavior policy
    "loss_masks",  # N x [R_i] int32, full on every rank
    "total_lengths",  # N host integers
    "response_lengths",  # N host integers
)
OPTIONAL = (
    "cur_log_probs",  # N x [L_i] with grad, target policy
    "advantages",  # N x [L_i], or [T]
)
ALIASES = {"current_log_probs": "cur_log_probs"}
FUNCTIONS = (  # arguments that name a function, for training or for the rollout's bookkeeping
    "custom_megatron_init_path",
    "custom_megatron_before_log_prob_hook_path",
    "custom_megatron_before_train_step_hook_path",
    "rollout_data_postprocess_path",
    "custom_advantage_function_path",
    "custom_loss_function_path",
    "custom_pg_loss_reducer_function_path",
    "custom_convert_samples_to_train_data_path",
    "custom_reward_post_process_path",
    "custom_rollout_log_function_path",
    "custom_eval_rollout_log_function_path",
)
HOOK = "--custom-tis-function-path"
TIS = "slime_ext.tis"  # the module whose functions --custom-tis-function-path names
# The three functions that slime has too. They take their bounds from the host's flags BAND and RANGE.
SLIME_FUNCTIONS = ("vanilla_tis_function", "icepop_function", "off_policy_is_function")
BAND, RANGE = ("tis_clip_low", "tis_clip"), ("eps_clip", "eps_clip_high")
INIT_FLAG = "--custom-megatron-init-path slime_ext.host.init"
OURS = {  # argument -> the slime_ext function for it
    "custom_megatron_init_path": "slime_ext.host.init",
    "rollout_data_postprocess_path": "slime_ext.host.rollout_data_postprocess",
    "custom_rollout_log_function_path": "slime_ext.host.log_rollout",
    "custom_generate_function_path": "slime_ext.host.generate",
}
INIT, LOG = "custom_megatron_init_path", "custom_rollout_log_function_path"
LOG_FLAG = f"--custom-rollout-log-function-path {OURS[LOG]}"
GENERATE_FLAG = f"--custom-generate-function-path {OURS['custom_generate_function_path']}"
METRICS = ("off_policy/host/ratio", "off_policy/host/clipped", "off_policy/host/rejected")
MOST_DIGITS = 18  # of a weight version, so that it fits into an int64


def takes_tis_bounds() -> bool:
    """Tells whether ``off_policy_is_function`` takes its bounds from --tis-clip-low and --tis-clip.

    It does if the host itself defines that function, as slime does since PR 2084 (August 2026).
    """
    return hasattr(sys.modules.get("slime.utils.ppo_utils"), "off_policy_is_function")


def calls_hook(args: Any) -> bool:
    """Tells whether the host's policy loss calls the function of --custom-tis-function-path."""
    return bool(getattr(args, "use_tis", False) or getattr(args, "get_mismatch_metrics", False))


def function_of(args: Any) -> str:
    """Returns the function of ``slime_ext.tis`` that --custom-tis-function-path names, or an empty name."""
    module, _, name = str(getattr(args, "custom_tis_function_path", None) or "").rpartition(".")
    return name if module == TIS else ""


def flag_of(dest: str) -> str:
    """Turns an argument's name into its flag: tis_clip -> --tis-clip."""
    return "--" + dest.replace("_", "-")


@dataclass(frozen=True)
class HookCall:
    """Holds the arguments of one hook call; None where the host passed nothing."""

    args: Any
    pg_loss: Tensor
    train_log_probs: Sequence[Tensor]
    rollout_log_probs: Sequence[Tensor]
    loss_masks: Sequence[Tensor]
    total_lengths: Sequence[int]
    response_lengths: Sequence[int]
    cur_log_probs: Sequence[Tensor] | None = None
    advantages: Sequence[Tensor] | Tensor | None = None
    max_seq_lens: Sequence[int] | None = None  # N, under --qkv-format bshd: in miles, in slime up to v0.3.0
    head: Head | Support | None = None  # the sampler's head and the trainer's log-probs there
    batch: Mapping[str, Any] | None = None  # the micro-batch of the policy loss, if it is known

    @classmethod
    def of(
        cls, args: Any, arguments: Mapping[str, Any], not_passed: Mapping[str, Any] | None = None
    ) -> HookCall:
        """Makes the call of a mapping of keywords, completed as ``filled`` does."""
        required: list[Any] = [arguments.get(key) for key in REQUIRED[1:]]
        return cls(args, *required).filled(arguments, not_passed or {})

    def filled(self, *sources: Mapping[str, Any]) -> HookCall:
        """Fills each argument that is None from the first source that has it, and checks the call.

        Args:
            sources: keywords by their names or aliases. Unknown keywords are ignored, because a newer host
                may pass more.

        Raises:
            ConfigError: a keyword is missing, or the behavior policy's log-probs are None.
        """
        values = dict(vars(self))
        for source in sources:
            for key, value in source.items():
                name = ALIASES.get(key, key)
                if name in values and values[name] is None:
                    values[name] = value
        if values["rollout_log_probs"] is None:
            raise ConfigError(
                "rollout_log_probs: expected one tensor per sample, got None: in a custom generate function, "
                "set return_logprob in the requests and fill Sample.rollout_log_probs with the log-probs of "
                "the sampled tokens"
            )
        if missing := [key for key in REQUIRED[1:] if values[key] is None]:
            raise ConfigError(
                f"hook call: expected the keywords {', '.join(REQUIRED)}, got no {', '.join(missing)}: "
                "call it as slime's policy loss does"
            )
        return HookCall(**values)

    def require(self, correction: Correction, who: str) -> None:
        """Raises ConfigError unless the host passed what the correction of function ``who`` reads."""
        target = "cur_log_probs (the trainer's log-probs with gradient)"
        passed = (
            (Need.TARGET, self.cur_log_probs, target),
            (Need.ADVANTAGES, self.advantages, "advantages"),
        )
        for need, value, what in passed:
            if value is None and need in correction.needs:
                raise ConfigError(
                    f"{who}: expected {what}, got none: add {INIT_FLAG}, which passes them on in every slime "
                    "since v0.2.0"
                )


def forbid_respelled(path: str, flag: str) -> None:
    """Raises ConfigError if a slime_ext function is not written as Python names it.

    >>> forbid_respelled("slime-ext/tis.py:token-tis", "--custom-tis-function-path")
    Traceback (most recent call last):
    slime_ext.errors.ConfigError: --custom-tis-function-path: expected slime_ext.tis.token_tis, got \
'slime-ext/tis.py:token-tis': write it with dots and underscores
    """
    dotted = re.sub(r"\.py(?=:|$)", "", path.strip(" ./"))
    right = re.sub("[:/]", ".", dotted).replace("-", "_")
    right = re.sub(r"^slime_?ext\.", "slime_ext.", right, flags=re.IGNORECASE)
    if right.startswith("slime_ext.") and right != path:
        raise ConfigError(f"{flag}: expected {right}, got '{cut(path)}': write it with dots and underscores")


def forbid_other(dest: str, path: str | None) -> None:
    """Raises ConfigError if an argument of ``OURS`` names a slime_ext function of another argument."""
    forbid_respelled(path or "", flag_of(dest))
    ours = OURS[dest]
    if path and path.startswith("slime_ext") and path != ours:
        near = did_you_mean(path, [ours])
        raise ConfigError(f"{flag_of(dest)}: expected {ours} of slime_ext, got '{cut(path)}'{near}")


def load_function(path: str, flag: str) -> Callable[..., Any]:
    """Imports ``package.module.function`` as slime does. Errors name the ``flag``."""
    forbid_respelled(path, flag)
    where = f"{flag} {path}"
    function: Callable[..., Any] = load_named(path, where, "function")
    if not callable(function):
        raise ConfigError(f"{where}: expected a function, got a {type(function).__name__}: name a function")
    return function


def check_hook(path: str, keywords: Sequence[str]) -> None:
    """Imports the hook at ``path`` and checks its signature. It does not call the hook."""
    require_keywords(path, inspect.signature(load_function(path, HOOK)), keywords)


def require_keywords(path: str, signature: inspect.Signature, keywords: Sequence[str]) -> None:
    """Raises ConfigError unless the hook at ``path`` takes the host's keywords."""
    try:
        signature.bind(**dict.fromkeys(keywords))
    except TypeError as error:
        hint = ": add **kwargs to it" if "unexpected keyword" in str(error) else ""
        raise ConfigError(
            f"{HOOK} {path}: expected a function with the keywords {', '.join(keywords)}, got {signature}: "
            f"{error}{hint}"
        ) from error


def versions_of(value: Any) -> tuple[Any, ...]:
    """Returns the weight versions of a sample. A custom generate function may set a single one, or none.

    Newer miles keeps an object per engine call in its samples. In its train data it keeps a list of mappings
    {version, abs_start, abs_end} per call.

    >>> versions_of(["1", "2"]), versions_of(None), versions_of("12")
    (('1', '2'), (), ('12',))
    >>> versions_of([[{"version": "3", "abs_start": 0, "abs_end": 2}], [{"version": "4"}]])
    ('3', '4')
    """
    if value is None:
        return ()
    if isinstance(value, Mapping):
        return (value.get("version"),)
    if callable(to_dicts := getattr(value, "to_dicts", None)):
        return versions_of(to_dicts())
    if not isinstance(value, Iterable) or isinstance(value, str):
        return (value,)
    items = tuple(value)
    # A list may have an entry per token. All entries are of one kind, so the first one shows it.
    is_nested = bool(items) and (
        isinstance(items[0], Mapping | list | tuple) or hasattr(items[0], "to_dicts")
    )
    return tuple(version for item in items for version in versions_of(item)) if is_nested else items


def number_of(version: Any) -> int | None:
    """Reads a version's number. Returns None for other names, which engines have before the first push.

    >>> number_of("12"), number_of(12), number_of("default"), number_of("\u00b2")
    (12, 12, None, None)
    """
    text = str(version) if isinstance(version, str | Integral) else ""
    return int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else None
