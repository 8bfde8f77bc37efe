"""``slime_ext.host.init`` for ``--custom-megatron-init-path``, which slime calls before it builds the model.

Everything that can be wrong is said there, and what the hook needs from the host is put in place.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

from slime_ext import compiled
from slime_ext.config import read_config, to_mapping
from slime_ext.correction import Correction
from slime_ext.errors import ConfigError
from slime_ext.host import contract, host_hooks, hosts, staleness, train_step
from slime_ext.host.configured import correction_named, mapping_of_flags
from slime_ext.host.flags import check_command_line, check_flags, check_plan
from slime_ext.host.functions import check_call, flag_of
from slime_ext.host.hook import asks_for_compiled
from slime_ext.host.summary import formula, one_line
from slime_ext.optional_args import OptionalArgs
from slime_ext.steps import Reject, Veto

REDUCED = {  # mask_scope -> what a reducer that divides by its masks then does
    "policy": "it still counts rejected tokens; mask_scope: all hands it the reduced ones",
    "all": "rejected tokens leave its denominator; mask_scope: policy hands it the host's",
}
SHORT_LIVED = {  # argument -> what metrics and guards then are
    "release_train": "--release-train: expected a trainer that stays beside slime_ext.guards, got one that "
    "ends with each rollout: steps in a row and metrics_only begin anew with the next",
    "indep_dp": "--ft-components: expected data parallel ranks of one group, got independent replicas: "
    "metrics and guards are those of each replica alone, off_policy.jsonl has the first one's",
}
STOPS = (
    "--no-check-for-nan-in-loss-and-grad: expected a run that may end beside slime_ext, got one that skips "
    "steps with NaN: a NaN among the trainer's own log-probs stops it all the same"
)
log = logging.getLogger("slime_ext")


def init(args: Any) -> None:
    """Checks the run's arguments, puts the wrappers of the host's loss and of its train step in place, says
    what will run.

    Called again it checks again and installs nothing twice.

    Raises:
        ConfigError: one line that names the flag or key, what was expected, and what to do.
    """
    check_command_line(hosts.command_line(), args)
    check_flags(args)
    check_functions(args)
    has_host = host_hooks.install()
    correction = correction_of(args)
    train_step.install()
    if correction is not None and contract.function_of(args) not in contract.SEEDS:
        _check_correction(args, correction)
    if _is_first_rank():
        print(f"slime_ext: {_said(args, correction)}; {_host_said(has_host)}", flush=True)


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


def correction_of(args: Any) -> Correction | None:
    """The correction that the arguments name; None for a function that is not ours.

    Raises:
        ConfigError: it does not load, contradicts the flags, or no function of ours would read it.
    """
    correction = correction_named(args)
    is_read = correction is not None and contract.function_of(args) not in contract.SEEDS
    if not is_read and getattr(args, "slime_ext", None) is not None:
        raise ConfigError(
            f"--custom-tis-function-path: expected {contract.TIS}.correct beside the key slime_ext, got "
            f"{getattr(args, 'custom_tis_function_path', None) or 'none'}: nothing would read that key"
        )
    return correction


def _check_correction(args: Any, correction: Correction) -> None:
    _check_plan(args, correction)
    if correction.needs_ages:
        staleness.require_host(hosts.current())
    for name in read_config(mapping_of_flags(args)).guards:
        if name.startswith("staleness_"):
            staleness.require_guard(args, hosts.current(), f"slime_ext.guards.{name}")
    for warning in _warnings(args, correction):
        log.warning(warning)


def _check_plan(args: Any, correction: Correction) -> None:
    """What couples samples is computed in --rollout-data-postprocess-path, where all of a step is at hand."""
    if not correction.needs_plan:
        return
    host = hosts.current()
    check_plan(args, may_skip_proximal=bool(host and host.may_skip_proximal))
    if host and not host.hands_out_data:
        raise ConfigError(
            f"{host.name}: expected a release whose --rollout-data-postprocess-path sees the rollout (slime "
            "since v0.2.4), got one that calls it with args alone: a correction that couples samples needs it"
        )


def _warnings(args: Any, correction: Correction) -> Iterator[str]:
    a = OptionalArgs(args)
    rejects = any(isinstance(step, Reject | Veto) for step in correction.steps)
    reducer = a.custom_pg_loss_reducer_function_path
    if rejects and reducer:
        yield (
            f"--custom-pg-loss-reducer-function-path {reducer}: expected slime's reducer beside mask_scope: "
            f"{correction.mask_scope}, got one of yours: if it divides by the masks, "
            f"{REDUCED[correction.mask_scope]}"
        )
    if not correction.is_identity and not a.use_tis:
        yield "--use-tis: expected on beside a correction, got off: the loss stays as it is, only metrics"
    yield from (line for dest, line in SHORT_LIVED.items() if getattr(a, dest))
    if a.check_for_nan_in_loss_and_grad is False:
        yield STOPS
    if correction.is_identity and a.use_tis:
        yield "slime_ext.steps: expected one beside --use-tis, got none: the loss stays, only metrics"


def _said(args: Any, correction: Correction | None) -> str:
    a = OptionalArgs(args)
    path = a.custom_tis_function_path
    if not (a.use_tis or a.get_mismatch_metrics):
        return "no correction (--use-tis is off)"
    if (name := contract.function_of(args)) in contract.SEEDS:
        return f"{name}: {formula(name, vars(args))}"
    if correction is not None:
        acts = "" if a.use_tis else "metrics only, the loss stays as it is: "
        said = f"{acts}{_name(args, path)}: {one_line(to_mapping(correction))}"
        return f"{said}; {compiled.describe(asks_for_compiled(args))}"
    return f"the correction is {path or 'the host' + chr(39) + 's own'}, not one of slime_ext"


def _name(args: Any, path: str) -> str:
    mapping = getattr(args, "slime_ext", None) or {}
    return str(mapping.get("preset") or path.rpartition(".")[2])


def _host_said(has_host: bool) -> str:
    if not has_host:
        return "no slime in this process: the caller passes cur_log_probs and advantages"
    host = hosts.current()
    how = "passes cur_log_probs itself" if host.passes_target else "cur_log_probs and advantages are carried"
    return f"{host.name} {host.version}: {how}"


def _is_first_rank() -> bool:
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not ready or torch.distributed.get_rank() == 0
