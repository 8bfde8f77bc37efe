"""``slime_ext.host.init`` for ``--custom-megatron-init-path``, which slime calls before it builds the model.

It checks flags, functions and configuration, and wraps the host's functions that the hook needs. Up to
624b824 slime's policy loss has ``cur_log_probs`` and ``advantages`` at hand and passes neither to the hook. A
wrapper around ``policy_loss_function`` takes the advantages (and the padded lengths of --qkv-format bshd)
from its batch, one around ``get_log_probs_and_entropy`` the log-probs with gradient; ``HookCall.of`` reads
both. They belong to one call of the policy loss: a second run under ``--recompute-loss-function`` has its
own, in whichever thread it runs. What the host passes itself is used as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from slime_ext.config.load import read_config, to_mapping
from slime_ext.config.words import one_line
from slime_ext.core import compiled
from slime_ext.core.correction import Correction
from slime_ext.errors import ConfigError
from slime_ext.host import contract, hosts, staleness, train_step
from slime_ext.host.configured import (
    correction_named,
    loaded_from,
    mapping_of_flags,
    named_by,
    setup_of,
)
from slime_ext.host.contract import check_call, flag_of, loss_inputs
from slime_ext.host.flags import check_command_line, check_kinds
from slime_ext.host.hook import HostFlags
from slime_ext.host.rules import enforce

WRAPPED = ("policy_loss_function", "get_log_probs_and_entropy")
log = logging.getLogger("slime_ext")


def init(args: Any) -> None:
    """Checks the run's arguments, wraps the host's loss and its train step, prints what will run.

    Called again it checks again and wraps nothing twice.

    Raises:
        ConfigError: one line that names the flag or key, what was expected, and what to do.
    """
    check_command_line(hosts.command_line(), args)
    check_kinds(args)
    check_functions(args)
    wrap_loss()
    enforce(loaded_from(setup_of(args, named_by(args))))
    correction = correction_named(args)
    train_step.install()
    if correction is not None and contract.function_of(args) not in contract.SEEDS:
        _check_correction(args, correction)
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not ready or torch.distributed.get_rank() == 0:
        print(f"slime_ext: {_what_runs(args, correction)}; {_who_passes()}", flush=True)


def wrap_loss() -> None:
    """Wraps the policy loss of the host that this process belongs to, if it does to one; again is once.

    Raises:
        ConfigError: the host's loss module has not the functions of any release that is known.
    """
    host = hosts.current()
    if host is None:
        return
    module = host.loss_module()
    missing = [name for name in WRAPPED if not callable(getattr(module, name, None))]
    if missing:
        raise ConfigError(
            f"{host.loss}: expected {' and '.join(WRAPPED)}, got no {missing[0]}: this {host.name} is "
            "not known; add the lines of docs/patches.md by hand and drop --custom-megatron-init-path"
        )
    for name, around in zip(WRAPPED, (_with_batch, _noting_log_probs), strict=True):
        hosts.wrap(module, name, around)


def _with_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    def policy_loss_function(*args: Any, **kwargs: Any) -> Any:
        batch = kwargs["batch"] if "batch" in kwargs else args[1]
        inputs = {"advantages": batch["advantages"], "max_seq_lens": batch.get("max_seq_lens")}
        token = loss_inputs.set(inputs)
        try:
            return function(*args, **kwargs)
        finally:
            loss_inputs.reset(token)

    return policy_loss_function


def _noting_log_probs(function: Callable[..., Any]) -> Callable[..., Any]:
    def get_log_probs_and_entropy(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        inputs = loss_inputs.get()
        if inputs is not None:  # inside the policy loss; elsewhere it scores tokens for others
            made = result[1] if isinstance(result, tuple) else result  # a bare dict up to v0.2.2 and in miles
            inputs["cur_log_probs"] = list(made["log_probs"])
        return result

    return get_log_probs_and_entropy


def check_functions(args: Any) -> None:
    """Imports every function that a flag names and that training calls; binds the host's call to each.

    Raises:
        ConfigError: naming the flag, the function and what does not fit.
    """
    host = hosts.current()
    older = {"rollout_data_postprocess_path": ("args",)} if host and not host.hands_out_data else {}
    for dest, positional in {**contract.CALLS, **older}.items():
        if path := getattr(args, dest, None):
            check_call(flag_of(dest), path, positional)
    if path := getattr(args, "custom_tis_function_path", None):
        more = contract.OPTIONAL if host is None or host.passes_target else ()
        check_call("--custom-tis-function-path", path, (), (*contract.REQUIRED, *more))


def _check_correction(args: Any, correction: Correction) -> None:
    host = hosts.current()
    if correction.needs_plan and host and not host.hands_out_data:
        raise ConfigError(
            f"{host.name}: expected a release whose --rollout-data-postprocess-path sees the rollout (slime "
            "since v0.2.4), got one that calls it with args alone: a correction that couples samples needs it"
        )
    if correction.needs_ages:
        staleness.require_host(host)
    logs = getattr(args, staleness.LOG, None) == contract.OURS[staleness.LOG]
    for name in read_config(mapping_of_flags(args)).guards:
        if name.startswith("staleness_") and not logs:  # for which the ages of a whole rollout are enough
            remedy = f"add {flag_of(staleness.LOG)} {contract.OURS[staleness.LOG]}"
            staleness.require_host(host, f"slime_ext.guards.{name}", remedy)


def _what_runs(args: Any, correction: Correction | None) -> str:
    path, name = getattr(args, "custom_tis_function_path", None), contract.function_of(args)
    if not contract.calls_hook(args):
        return "no correction (--use-tis is off)"
    if correction is None:
        return f"the correction is {path or 'the host' + chr(39) + 's own'}, not one of slime_ext"
    only = "" if getattr(args, "use_tis", False) else "metrics only, the loss stays as it is: "
    preset = (getattr(args, "slime_ext", None) or {}).get("preset") or name
    backend = compiled.describe(HostFlags.of(args).compiled, correction)
    return f"{only}{preset}: {one_line(to_mapping(correction))}; {backend}"


def _who_passes() -> str:
    """Who passes cur_log_probs and advantages to the hook."""
    host = hosts.current()
    if host is None:
        return "no slime in this process: the caller passes cur_log_probs and advantages"
    own = host.passes_target
    who = "passes cur_log_probs itself" if own else "init passes cur_log_probs and advantages to the hook"
    return f"{host.name} {host.version}: {who}"
