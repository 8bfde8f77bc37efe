"""Functions that flags name: they import and can be called as the launcher will."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from typing import Any

from slime_ext.errors import ConfigError
from slime_ext.host import contract
from slime_ext.launcher.functions import load_function
from slime_ext.launcher.validation.numbers import flag_of

# slime's call of each hook: names of the positional arguments
POSITIONAL = {
    "custom_rm_path": ("args", "sample"),
    "custom_pg_loss_reducer_function_path": (
        "total_lengths",
        "response_lengths",
        "loss_masks",
        "calculate_per_token_loss",
    ),
    "custom_megatron_init_path": ("args",),
    "rollout_data_postprocess_path": ("args", "rollout_id", "rollout_data"),
    "custom_megatron_before_train_step_hook_path": (
        "args",
        "rollout_id",
        "step_id",
        "model",
        "optimizer",
        "opt_param_scheduler",
    ),
    "custom_rollout_log_function_path": (
        "rollout_id",
        "args",
        "samples",
        "rollout_extra_metrics",
        "rollout_time",
    ),
}
# the correction is called with keywords only
CORRECTION = (*contract.REQUIRED, *contract.OPTIONAL)


def check_functions(args: argparse.Namespace) -> None:
    """Imports every function that a flag names and binds the launcher's call to its signature."""
    for dest, names in POSITIONAL.items():
        if path := getattr(args, dest):
            _check_call(flag_of(dest), path, names, {})
    if path := args.custom_tis_function_path:
        _check_call("--custom-tis-function-path", path, (), dict.fromkeys(CORRECTION))


def _check_call(flag: str, path: str, positional: tuple[str, ...], keywords: dict[str, Any]) -> None:
    function = load_function(path, flag)
    signature = _signature(function)
    if signature is None:
        return
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        wanted = ", ".join(positional) if positional else f"the keywords {', '.join(keywords)}"
        hint = ": add **kwargs to it" if "unexpected keyword" in str(error) else ""
        raise ConfigError(
            f"{flag} {path}: expected a function of {wanted}, got {signature}: {error}{hint}"
        ) from error


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """None for what has no signature to look at, such as a builtin."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _check_correction(args: argparse.Namespace) -> None:
    """One of our own functions finds under ``slime_ext:`` what it will read there."""
    module, _, name = (args.custom_tis_function_path or "").rpartition(".")
    if module != "slime_ext.tis":
        return
    from slime_ext import presets
    from slime_ext.host.hook import correction_for
    from slime_ext.objectives import Host

    if name == "correct" or name in (*presets.PRESETS, *presets.ALIASES):
        correction = correction_for(args, None if name == "correct" else name)
        if args.use_tis and args.policy_loss == "gspo" and not isinstance(correction.surrogate, Host):
            raise ConfigError(
                f"--policy-loss: expected another than gspo beside slime_ext.tis.{name}, got gspo: the "
                "correction brings a loss of its own and would discard its sequence ratio"
            )


def check_config(args: argparse.Namespace) -> None:
    """The mapping under ``slime_ext:`` is one that `load_config` accepts, and a hook that reads it is set."""
    _check_correction(args)
    if args.slime_ext is None:
        return
    from slime_ext.config import load_config

    load_config(args.slime_ext, args)
    hooks = (*POSITIONAL, "custom_tis_function_path")
    if not any(str(getattr(args, dest)).startswith("slime_ext.") for dest in hooks):
        raise ConfigError(
            f"--custom-config-path {args.custom_config_path}: slime_ext: expected --custom-tis-function-path "
            "slime_ext.tis.correct beside it, got no function that reads it"
        )
