"""Defines ``slime_ext.host.init`` for ``--custom-megatron-init-path``.

slime calls the function before it builds the model. The function checks flags, functions and configuration,
and wraps the host's three functions (``hosts``).

The policy loss has ``cur_log_probs`` and ``advantages``, but passes neither to the hook. So a wrapper around
the policy loss takes the advantages (and the padded lengths of --qkv-format bshd) from its batch. A wrapper
around ``get_log_probs_and_entropy`` takes the log-probs with gradient. The hook reads both. They are
kept for one call of the policy loss, because a second run under ``--recompute-loss-function`` has other
tensors and may run in another thread. What the host itself passes is used unchanged. The wrapper also
measures a policy loss that did not call our hook.

If you have an ``init`` function, call this one from it with the same arguments, at its start or at its end.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

from slime_ext.config.load import to_mapping
from slime_ext.config.words import one_line
from slime_ext.errors import ConfigError
from slime_ext.host import heads, policy_loss, proximal_heads, train_step, wrapping
from slime_ext.host.configured import setup_for
from slime_ext.host.current import current_host
from slime_ext.host.hook import observe
from slime_ext.host.policy_loss import LossCall
from slime_ext.host.ranks import global_rank, parallel_state
from slime_ext.host.step_metrics import current_step
from slime_ext.hosts import contract, running
from slime_ext.hosts.code import DOCS, LEADING, LOSS, STEP, TARGET
from slime_ext.hosts.flags import check_command_line, check_kinds
from slime_ext.rules.judge import enforce
from slime_ext.rules.of_hosts import DYNAMIC
from slime_ext.rules.setup import Setup

NO_TRAIN_STEP = (
    f"{{name}}: expected {STEP} among its loaded modules, got none, as in trainers without Megatron "
    "(FSDP): there are no guards, no certificate, no off_policy.jsonl, and no metrics except those that the "
    "host logs itself: to get them, use --train-backend megatron"
)
log = logging.getLogger("slime_ext")


def init(args: Any) -> None:
    """Checks the arguments, wraps the host's loss and train step, and prints what will run.

    A second call checks again, and wraps nothing twice.

    Raises:
        ConfigError: a flag, a function or the configuration is wrong. Its one line says what to do.
    """
    check_command_line(running.command_line(), args)
    check_kinds(args)
    host = host_that_trains()
    if host is not None:
        wrap_loss(host)
        train_step.install(host)
        proximal_heads.install(host)
    check_functions(args, host)
    setup = setup_for(args)
    enforce(setup)
    if host is not None:
        carry_to_hook(args)
        if host.step is None:
            log.warning(NO_TRAIN_STEP.format(name=host.name))
    if not global_rank():
        print(f"slime_ext: {_what_runs(setup)}; {_who_passes(host)}", flush=True)


def host_that_trains() -> running.Host | None:
    """Returns the current host, or None in a process that does not train.

    Raises:
        ConfigError: the process trains without a known host, or the host's functions have other parameters.
    """
    host = current_host()
    if host is None and parallel_state() is not None:
        raise ConfigError(
            f"slime_ext.host.init: expected a host with {LOSS}({', '.join(LEADING[LOSS])}), got none among "
            f"the {len(sys.modules)} modules loaded here: this host is not known; {DOCS}"
        )
    if host is not None and host.fault:
        raise ConfigError(host.fault)
    return host


def wrap_loss(host: running.Host) -> None:
    """Wraps a host's policy loss; idempotent."""
    wrapping.wrap(host.loss, LOSS, _with_batch)
    wrapping.wrap(host.loss, TARGET, functools.partial(_noting_log_probs, host))


def _with_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def policy_loss_function(*positional: Any, **named: Any) -> Any:
        call = signature.bind(*positional, **named).arguments
        args, batch = call["args"], call["batch"]
        if batch.get("dynamic_cp_size") is not None:  # Relax sets it, whatever the flags say
            raise ConfigError(DYNAMIC)
        loss_call = LossCall(current_step(), batch)
        token = policy_loss.RUNNING.set(loss_call)
        try:
            loss = function(*positional, **named)
            observe(args, loss_call)
        finally:
            policy_loss.RUNNING.reset(token)
        return loss

    return policy_loss_function


def _noting_log_probs(host: running.Host, function: Callable[..., Any]) -> Callable[..., Any]:
    def get_log_probs_and_entropy(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        loss_call = policy_loss.RUNNING.get()
        if loss_call is not None:  # inside the policy loss; other calls only score tokens
            made = result[1] if isinstance(result, tuple) else result  # a bare dict up to v0.2.2 and in miles
            if loss_call.cur_log_probs is None:
                loss_call.cur_log_probs = list(made["log_probs"])
            loss_call.head = heads.at_logits(args, kwargs, loss_call, host)
        return result

    return get_log_probs_and_entropy


def carry_to_hook(args: Any) -> None:
    """Wraps a user's hook to pass ``cur_log_probs`` and ``advantages`` to it; idempotent."""
    path = getattr(args, "custom_tis_function_path", None)
    if path and not contract.function_of(args):
        module, _, name = path.rpartition(".")
        wrapping.wrap(sys.modules[module], name, _carrying)


def _carrying(function: Callable[..., Any]) -> Callable[..., Any]:
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    names = [name for name in contract.OPTIONAL if takes_all or name in parameters]

    def hook(*positional: Any, **named: Any) -> Any:
        not_passed = policy_loss.current().keywords()
        carried = {name: not_passed[name] for name in names if not_passed[name] is not None}
        return function(*positional, **(carried | named))

    return hook


def check_functions(args: Any, host: running.Host | None) -> None:
    """Checks the slime_ext functions that flags name, and the hook's signature.

    Of a user's functions only the hook is imported, because the others may exist only in other processes.
    """
    for dest in contract.OURS:
        contract.forbid_other(dest, getattr(args, dest, None))
    if path := getattr(args, "custom_tis_function_path", None):
        more = contract.OPTIONAL if host is None or host.passes("cur_log_probs") else ()
        contract.check_hook(path, (*contract.REQUIRED, *more))


def _what_runs(setup: Setup) -> str:
    args, correction = setup.args, setup.correction
    path = getattr(args, "custom_tis_function_path", None)
    if not contract.calls_hook(args):
        return "no correction, only metrics (--use-tis is off)"
    if not setup.function:
        theirs = path or "the host's own"
        return f"the correction is {theirs}, not one of slime_ext"
    only = "" if getattr(args, "use_tis", False) else "metrics only, the loss stays as it is: "
    mapping = getattr(args, "slime_ext", None) or {}
    return f"{only}{mapping.get('preset') or setup.function}: {one_line(to_mapping(correction))}"


def _who_passes(host: running.Host | None) -> str:
    """Says who passes cur_log_probs and advantages to the hook."""
    if host is None:
        return "no slime in this process: the caller passes cur_log_probs and advantages"
    passes_itself = host.passes("cur_log_probs")
    who = (
        "passes cur_log_probs itself"
        if passes_itself
        else "init passes cur_log_probs and advantages to the hook"
    )
    return f"{host.name}: {who}"
