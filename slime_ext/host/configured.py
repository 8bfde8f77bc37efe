"""The correction that a run's flags and its ``slime_ext:`` mapping describe, read once per args object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slime_ext import presets
from slime_ext.config.files import read_yaml
from slime_ext.config.load import read_config, with_preset
from slime_ext.config.loaded import Loaded
from slime_ext.core.correction import Correction
from slime_ext.core.losses import PpoClip
from slime_ext.core.state import Step, expect
from slime_ext.core.steps import Clip, Reject, Reweight
from slime_ext.errors import ConfigError, warn_once
from slime_ext.host import hosts
from slime_ext.host.contract import (
    BAND,
    INIT_FLAG,
    OURS,
    RANGE,
    SEEDS,
    calls_hook,
    function_of,
    takes_tis_bounds,
)
from slime_ext.host.flags import ARGUMENTS, check_command_line, check_kinds
from slime_ext.host.rules import OF_THE_CORRECTION, OF_THE_FILE, Setup, enforce, fault_of, require

WITHOUT = (
    "the configuration is checked only now, after the first rollout, and there are no guards and no metrics "
    "but those of the host's own channel"
)
LATE = f"slime_ext: expected {INIT_FLAG} at start-up, got a first hook call without it: {WITHOUT}"
UNCALLED = (
    f"slime_ext: expected a backend that calls {INIT_FLAG}, got one that does not (miles' --train-backend "
    f"fsdp): {WITHOUT}; what needs cur_log_probs or advantages stops here"
)
BOUNDS = (*BAND, *RANGE)
_checked: Any = None
_loaded: dict[str, tuple[Any, Any, Correction]] = {}  # function -> args, what it reads of them, correction


def correction_for(args: Any, function: str = "correct") -> Correction:
    """The correction of a function of ``slime_ext.tis``, read once per args object.

    Args:
        function: ``correct``, one of ``contract.SEEDS``, whose bounds the host's flags give, or a preset, to
            which the mapping may then only add.

    Raises:
        ConfigError: no configuration at all, one that does not load, or one that breaks a rule.
    """
    reads = [getattr(args, name, None) for name in read_by(function)]
    owner, known, correction = _loaded.get(function, (None, None, None))
    if correction is None or owner is not args or known != reads:
        check_first_call(args, function)
        setup = loaded_from(setup_of(args, function))
        enforce(setup, OF_THE_CORRECTION)
        for note in setup.loaded.notes:
            warn_once(f"slime_ext: {note}")
        correction = setup.correction
        _loaded[function] = (args, reads, correction)
    return correction


def read_by(function: str) -> tuple[str, ...]:
    """The arguments that a function of ``slime_ext.tis`` is made from."""
    return BOUNDS if function in SEEDS else ("slime_ext",)


def loaded_from(setup: Setup) -> Setup:
    """A setup with what its function is made of. Raises ConfigError as ``correction_for``."""
    require(setup, rules=OF_THE_FILE)
    function, args = setup.function, setup.args
    if function in SEEDS:
        return replace(setup, loaded=Loaded(_of_bounds(function, args)))
    mapping = getattr(args, "slime_ext", None)
    if not function:  # another's, beside which ours measures
        return setup if mapping is None else replace(setup, loaded=read_config(mapping))
    return replace(
        setup, loaded=read_config(with_preset(mapping, None if function == "correct" else function))
    )


def _of_bounds(function: str, args: Any) -> Correction:
    """A seed's function: its steps from the host's flags, whose names its refusals have."""
    low, high, eps_low, eps_high = (
        ARGUMENTS[name].default if (value := getattr(args, name, None)) is None else value for name in BOUNDS
    )
    if function == "off_policy_is_function" and not takes_tis_bounds():
        eps_high = eps_low if eps_high is None else eps_high
        _forbid_fault(PpoClip, {"eps_low": eps_low, "eps_high": eps_high}, RANGE)
        return Correction("target", steps=(Reweight(), Clip(max(1 - eps_low, 0.0), 1 + eps_high)))
    _forbid_fault(_clipped, {"low": low, "high": high}, BAND)
    if function == "off_policy_is_function":
        return Correction("target", steps=_clipped(low, high))
    if function == "vanilla_tis_function":
        return Correction(steps=_clipped(low, high))
    return Correction(steps=(Reweight(), Reject("token", "ratio", "mean", low, high)))


def _clipped(low: float, high: float) -> tuple[Step, ...]:
    expect(low < high, "clip.high", f"more than --tis-clip-low {low}", high, "every weight would be the same")
    return (Reweight(), Clip(low, high))


def _forbid_fault(make: Callable[..., Any], fields: Mapping[str, float], dests: Sequence[str]) -> None:
    if fault := fault_of(make, fields, dict(zip(fields, dests, strict=True))):
        raise ConfigError(fault)


def setup_of(args: Any, function: str) -> Setup:
    """What rules look at in a training process: with what its host says of itself."""
    host = hosts.current()
    says = getattr(host.loss, "get_pg_loss_type", None) if host else None
    try:
        loss_type = says(args) if says else None
    except ValueError as error:  # flags that the host's own parser refuses, set by a file
        raise ConfigError(f"--pg-loss-type: {error}") from None
    return Setup(
        args,
        function,
        file=_keys_of_file(args),
        pg_loss_type=loss_type,
        may_skip_proximal=bool(host and host.may_skip_proximal),
    )


def _keys_of_file(args: Any) -> tuple[str, ...]:
    """The top of --custom-config-path, where something of ours reads it and this process can."""
    path = getattr(args, "custom_config_path", None)
    is_ours = function_of(args) or getattr(args, "slime_ext", None) is not None
    if not (is_ours and isinstance(path, str) and Path(path).is_file()):
        return ()
    found = read_yaml(path, f"--custom-config-path {path}")
    return tuple(map(str, found)) if isinstance(found, Mapping) else ()


def check_first_call(args: Any, function: str = "correct") -> None:
    """What ``init`` would have checked of the flags, once per args object, in a host that did not call it.

    Raises:
        ConfigError: a misspelt flag, a value of another kind, or a broken rule.
    """
    global _checked
    if args is _checked:
        return
    host = hosts.current()
    if host is not None and not host.is_wrapped:
        named = getattr(args, "custom_megatron_init_path", None)
        warn_once(UNCALLED if named == OURS["custom_megatron_init_path"] else LATE)
        check_command_line(hosts.command_line(), args)
        check_kinds(args)
        enforce(loaded_from(setup_of(args, function)))
    _checked = args


def mapping_of_flags(args: Any) -> Mapping[str, Any]:
    """What stands under ``slime_ext:``, with the preset that the function's path names; {} for nothing."""
    mapping, name = getattr(args, "slime_ext", None) or {}, function_of(args)
    return {"preset": name, **mapping} if name in presets.NAMES else mapping


def named_by(args: Any) -> str:
    """The function of ``slime_ext.tis`` that the flags name; empty for another, or none."""
    name = function_of(args)
    return name if name in ("correct", *SEEDS, *presets.NAMES) else ""


def correction_named(args: Any) -> Correction | None:
    """The correction of the function that the flags name; None where it has none, or is another's.

    Raises:
        ConfigError: as ``correction_for``.
    """
    name = named_by(args)
    return correction_for(args, name) if name else None


def correction_of_flags(args: Any) -> Correction | None:
    """The correction that the hook will apply; None where the flags call no function that has one.

    Raises:
        ConfigError: as ``correction_for``.
    """
    return correction_named(args) if calls_hook(args) else None


def counts_target_twice(args: Any) -> bool:
    """Whether the second optimizer step of a rollout would count target / proximal twice."""
    correction, function = correction_of_flags(args), function_of(args)
    if correction is None or function in SEEDS:  # a seed's is what its name says, and warned of
        return False
    return replace(setup_of(args, function), loaded=Loaded(correction)).counts_target_twice
