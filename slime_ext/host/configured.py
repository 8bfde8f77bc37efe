"""The correction that a run's flags and its ``slime_ext:`` mapping describe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from slime_ext import presets
from slime_ext.config.files import read_yaml
from slime_ext.config.load import read_config, with_preset
from slime_ext.core.centering import Center
from slime_ext.core.correction import Correction, Numerator
from slime_ext.core.fields import LARGEST
from slime_ext.core.losses import PpoClip
from slime_ext.core.state import Step, expect
from slime_ext.core.steps import Clip, Reject, Reweight
from slime_ext.errors import ConfigError, did_you_mean, warn_once
from slime_ext.host import hosts
from slime_ext.host.contract import (
    BAND,
    INIT_FLAG,
    RANGE,
    SEEDS,
    flag_of,
    function_of,
    takes_tis_bounds,
)
from slime_ext.host.flags import ARGUMENTS, check_kinds
from slime_ext.host.rules import ALL, OF_THE_CORRECTION, OF_THE_FILE, Setup, enforce, require

LATE = (
    f"slime_ext: expected {INIT_FLAG} at start-up, got a first hook call without it (miles' --train-backend "
    "fsdp never calls it): the configuration is checked only now, after the first rollout, and there are no "
    "guards and no metrics but those of the host's own channel"
)
BOUNDS = (*BAND, *RANGE)  # what a seed's function is made from, as another is from the key slime_ext
NAMES = ("correct", *SEEDS, *presets.NAMES)  # the functions of slime_ext.tis


def near_function(name: str) -> str:
    """The function of ``slime_ext.tis`` that a wrong name means, or what that name is, as a clause."""
    if name in presets.ESTIMATORS:
        return f"; {name} is {presets.an_estimator(name)}"
    return did_you_mean(name, NAMES)


def setup_for(args: Any, function: str | None = None) -> Setup:
    """What flags and mapping say, with what this process's host says of itself.

    Args:
        function: of ``slime_ext.tis``: ``correct``, one of ``contract.SEEDS``, whose bounds the host's flags
            give, or a preset, to which the mapping may then only add. None: the one that the flags name,
            whether the host calls it or not.

    Raises:
        ConfigError: no configuration at all, one that does not load, or one that breaks a rule.
    """
    function, host = _named(args) if function is None else function, hosts.current()
    is_late = bool(function) and host is not None and not host.is_wrapped
    if is_late:
        warn_once(LATE)
        check_kinds(args)
    file, loss_type = _keys_of_file(args), _loss_type(args, host)
    setup = loaded_from(Setup(args, function, file=file, pg_loss_type=loss_type, host=host, trains=True))
    enforce(setup, ALL if is_late else OF_THE_CORRECTION)
    for note in setup.loaded.notes:
        warn_once(f"slime_ext: {note}")
    return setup


def loss_has_ratio(args: Any) -> bool:
    """Whether the policy loss of this process's host is PPO's; else -A log pi_target."""
    host = hosts.current()
    return Setup(args, pg_loss_type=_loss_type(args, host), host=host).has_ratio


def _loss_type(args: Any, host: hosts.Host | None) -> str | None:
    """What the host's ``get_pg_loss_type`` says; None where it has none."""
    says = getattr(host.loss, "get_pg_loss_type", None) if host else None
    try:
        return says(args) if says else None
    except ValueError as error:  # flags that the host's own parser refuses, set by a file
        raise ConfigError(f"--pg-loss-type: {error}") from None


def loaded_from(setup: Setup) -> Setup:
    """A setup with what its function is made of; of another's function, beside which ours measures, only
    guards and metrics. Raises ConfigError as ``setup_for``."""
    require(setup, rules=OF_THE_FILE)
    function, mapping = setup.function, getattr(setup.args, "slime_ext", None)
    if function and function not in SEEDS:
        mapping = with_preset(mapping, None if function == "correct" else function)
    loaded = setup.loaded if mapping is None else read_config(mapping)
    if function in SEEDS:
        loaded = replace(loaded, correction=_of_bounds(function, setup.args))
    return replace(setup, loaded=loaded)


def _of_bounds(function: str, args: Any) -> Correction:
    """A seed's function: its steps from the host's flags, whose names its refusals have."""
    low, high, eps_low, eps_high = (
        ARGUMENTS[name].default if (value := getattr(args, name, None)) is None else value for name in BOUNDS
    )
    of_range = function == "off_policy_is_function" and not takes_tis_bounds()
    numerator: Numerator = "target" if function == "off_policy_is_function" else "proximal"
    try:
        if of_range:
            eps_high = eps_low if eps_high is None else eps_high
            PpoClip(eps_low=eps_low, eps_high=eps_high)  # which knows what a range may be
            low, high = max(1 - eps_low, 0.0), 1 + eps_high
        else:
            same = "every weight would be the same"
            expect(low < high, "clip.high", f"more than --tis-clip-low {low}", high, same)
        bounds = _clip(low, high)  # which knows what a range may be, that of a band too
        if function == "icepop_function":
            bounds = _band(low, high)
        return Correction(numerator, steps=(Reweight(), *bounds))
    except ConfigError as error:
        where, _, rest = str(error).partition(": ")
        fields = dict(zip(("low", "high", "eps_low", "eps_high"), BOUNDS, strict=True))
        other = "eps_clip" if of_range else "tis_clip"
        raise ConfigError(f"{flag_of(fields.get(where.rpartition('.')[2], other))}: {rest}") from None


def _clip(low: float, high: float) -> tuple[Step, ...]:
    """The clip of weights that flags ask for; an infinite bound is none."""
    if low == 0 and high == math.inf:
        return ()
    return (Clip(low, LARGEST if high == math.inf else high),)


def _band(low: float, high: float) -> tuple[Step, ...]:
    """The rejection of tokens that flags ask for; an infinite bound is none."""
    upper = None if high == math.inf else high
    return () if low == 0 and upper is None else (Reject("token", "ratio", "mean", low, upper),)


def _keys_of_file(args: Any) -> tuple[str, ...]:
    """The top of --custom-config-path, where something of ours reads it and this process can."""
    path = getattr(args, "custom_config_path", None)
    is_ours = function_of(args) or getattr(args, "slime_ext", None) is not None
    if not (is_ours and isinstance(path, str) and Path(path).is_file()):
        return ()
    content = read_yaml(path, f"--custom-config-path {path}")
    return tuple(map(str, content)) if isinstance(content, Mapping) else ()


def center_of_flags(args: Any) -> Center | None:
    """What ``center`` says in the correction that the flags name; for each sample in the rollout's process,
    so it reads no file and asks no host."""
    return loaded_from(Setup(args, _named(args))).loaded.correction.center


def _named(args: Any) -> str:
    name = function_of(args)
    return name if name in NAMES else ""
