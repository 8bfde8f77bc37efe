"""``slime_ext.host.init`` for ``--custom-megatron-init-path``, which slime calls before it builds the model.

It checks flags, functions and configuration, and wraps the host's three functions (``hosts``). The policy
loss has ``cur_log_probs`` and ``advantages`` at hand and passes neither to the hook: a wrapper around it
takes the advantages (and the padded lengths of --qkv-format bshd) from its batch, one around
``get_log_probs_and_entropy`` the log-probs with gradient; ``HookCall.of`` reads both. They belong to one call
of the policy loss: a second run under ``--recompute-loss-function`` has its own, in whichever thread it runs.
What the host passes itself is used as it is. A policy loss that did not call our hook is measured from the
same wrapper.

An ``init`` of your own calls this one with the same arguments, before or after what else it does.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

from slime_ext.config.load import to_mapping
from slime_ext.config.words import one_line
from slime_ext.errors import ConfigError
from slime_ext.host import contract, heads, hosts, proximal_heads, train_step
from slime_ext.host.configured import setup_for
from slime_ext.host.contract import flag_of
from slime_ext.host.flags import check_command_line, check_kinds
from slime_ext.host.hook import observe
from slime_ext.host.rules import DYNAMIC, Setup, enforce
from slime_ext.host.session import session

UNSEEN = (
    f"{{name}}: expected {hosts.STEP} among its loaded modules, got none, as in trainers without Megatron "
    "(FSDP): no metrics but the host's own channel, no guards, certificate or off_policy.jsonl"
)
log = logging.getLogger("slime_ext")


def init(args: Any) -> None:
    """Checks the run's arguments, wraps the host's loss and its train step, prints what will run.

    Called again it checks again and wraps nothing twice.

    Raises:
        ConfigError: one line that names the flag or key, what was expected, and what to do.
    """
    check_command_line(hosts.command_line(), args)
    check_kinds(args)
    host = hosts.require()
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
            log.warning(UNSEEN.format(name=host.name))
    if not hosts.rank():
        print(f"slime_ext: {_what_runs(setup)}; {_who_passes(host)}", flush=True)


def wrap_loss(host: hosts.Host) -> None:
    """Wraps a host's policy loss; idempotent."""
    hosts.wrap(host.loss, hosts.LOSS, _with_batch)
    hosts.wrap(host.loss, hosts.TARGET, _noting_log_probs)


def _with_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def policy_loss_function(*given: Any, **named: Any) -> Any:
        call = signature.bind(*given, **named).arguments
        args, batch = call["args"], call["batch"]
        if batch.get("dynamic_cp_size") is not None:  # Relax, whatever its flags say
            raise ConfigError(DYNAMIC)
        inputs = {key: batch.get(key) for key in ("advantages", "max_seq_lens")} | {"batch": batch}
        token = session.loss_inputs.set(inputs)
        try:
            loss = function(*given, **named)
            observe(args, batch, inputs)
        finally:
            session.loss_inputs.reset(token)
        return loss

    return policy_loss_function


def _noting_log_probs(function: Callable[..., Any]) -> Callable[..., Any]:
    def get_log_probs_and_entropy(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        inputs = session.loss_inputs.get()
        if inputs is not None:  # inside the policy loss; elsewhere it scores tokens for others
            made = result[1] if isinstance(result, tuple) else result  # a bare dict up to v0.2.2 and in miles
            inputs.setdefault("cur_log_probs", list(made["log_probs"]))
            inputs["head"] = heads.at_logits(args, kwargs, inputs)
        return result

    return get_log_probs_and_entropy


def carry_to_hook(args: Any) -> None:
    """Wraps a hook of the user's own, so that it gets ``cur_log_probs`` and ``advantages`` by keyword, as our
    hooks do; idempotent."""
    path = getattr(args, "custom_tis_function_path", None)
    if path and not contract.function_of(args):
        module, _, name = path.rpartition(".")
        hosts.wrap(sys.modules[module], name, _carrying)


def _carrying(function: Callable[..., Any]) -> Callable[..., Any]:
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    names = [name for name in contract.OPTIONAL if takes_all or name in parameters]

    def hook(*given: Any, **named: Any) -> Any:
        held = session.loss_inputs.get() or {}
        carried = {name: held[name] for name in names if held.get(name) is not None}
        return function(*given, **(carried | named))

    return hook


def check_functions(args: Any, host: hosts.Host | None) -> None:
    """Imports the functions of ours that flags name, and binds the host's call to the hook. Others' may be
    for other processes, which find them elsewhere."""
    for dest in contract.OURS:
        if str(path := getattr(args, dest, None)).startswith("slime_ext."):
            contract.load_function(str(path), flag_of(dest))
    if path := getattr(args, "custom_tis_function_path", None):
        more = contract.OPTIONAL if host is None or host.passes("cur_log_probs") else ()
        contract.check_hook(path, (*contract.REQUIRED, *more))


def _what_runs(setup: Setup) -> str:
    args, correction = setup.args, setup.correction
    path = getattr(args, "custom_tis_function_path", None)
    if not contract.calls_hook(args):
        return "no correction, only metrics (--use-tis is off)"
    if not setup.function:
        return f"the correction is {path or 'the host' + chr(39) + 's own'}, not one of slime_ext"
    only = "" if getattr(args, "use_tis", False) else "metrics only, the loss stays as it is: "
    mapping = getattr(args, "slime_ext", None) or {}
    return f"{only}{mapping.get('preset') or setup.function}: {one_line(to_mapping(correction))}"


def _who_passes(host: hosts.Host | None) -> str:
    """Who passes cur_log_probs and advantages to the hook."""
    if host is None:
        return "no slime in this process: the caller passes cur_log_probs and advantages"
    passes_itself = host.passes("cur_log_probs")
    who = (
        "passes cur_log_probs itself"
        if passes_itself
        else "init passes cur_log_probs and advantages to the hook"
    )
    return f"{host.name}: {who}"
