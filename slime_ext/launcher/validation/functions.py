"""Functions that flags name: they import and can be called as the launcher will."""

from __future__ import annotations

import argparse

from slime_ext.errors import ConfigError
from slime_ext.host import contract
from slime_ext.host.contract import check_call, flag_of
from slime_ext.launcher.training_data import needs_proximal_forward

# The host's call of each hook that this launcher has: names of the positional arguments.
HOOKS = (
    "custom_megatron_init_path",
    "rollout_data_postprocess_path",
    "custom_rollout_log_function_path",
)
POSITIONAL = {"custom_rm_path": ("args", "sample"), **{dest: contract.CALLS[dest] for dest in HOOKS}}
# the correction is called with keywords only
CORRECTION = (*contract.REQUIRED, *contract.OPTIONAL)


def check_functions(args: argparse.Namespace) -> None:
    """Imports every function that a flag names and binds the launcher's call to its signature."""
    for dest, names in POSITIONAL.items():
        if path := getattr(args, dest):
            check_call(flag_of(dest), path, names)
    if path := args.custom_tis_function_path:
        check_call("--custom-tis-function-path", path, (), CORRECTION)


def _check_correction(args: argparse.Namespace) -> None:
    """One of our own functions finds under ``slime_ext:`` what it will read there."""
    name = contract.function_of(args)
    if not name:
        return
    from slime_ext.host.configured import correction_named  # torch, which a mistake before it saves
    from slime_ext.losses import HostLoss

    correction = correction_named(args)
    if correction is None:
        return
    if correction.needs_plan:
        _check_plan(args)
    if args.use_tis and args.advantage_estimator == "gspo" and not isinstance(correction.surrogate, HostLoss):
        raise ConfigError(
            f"--advantage-estimator: expected another than gspo beside slime_ext.tis.{name}, got gspo: the "
            "correction brings a loss of its own and would discard its sequence ratio"
        )


def _check_plan(args: argparse.Namespace) -> None:
    """What couples samples is computed before the first step, from log-probs that are there by then."""
    if args.rollout_data_postprocess_path != contract.PLAN:
        raise ConfigError(
            f"{contract.PLAN_FLAG}: expected {contract.PLAN} with a correction that couples the samples of "
            f"an optimizer step, got {args.rollout_data_postprocess_path or 'none'}: add it"
        )
    if not needs_proximal_forward(args):
        raise ConfigError(
            "--get-mismatch-metrics: expected on with a correction that couples the samples of an optimizer "
            "step, got off: no proximal log-probs are computed before training"
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
