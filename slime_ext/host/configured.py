"""Makes the correction that a run's flags and its ``slime_ext:`` mapping describe."""

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
from slime_ext.core.state import Step
from slime_ext.core.steps import Clip, Reject, Reweight
from slime_ext.errors import ConfigError, did_you_mean, expect, warn_once
from slime_ext.estimators import ESTIMATORS
from slime_ext.host.memory import Memory
from slime_ext.host.rules import ALL, OF_THE_CORRECTION, OF_THE_FILE, Setup, enforce, require
from slime_ext.host.wrapping import is_wrapped
from slime_ext.hosts import running
from slime_ext.hosts.contract import BAND, INIT_FLAG, RANGE, SEEDS, flag_of, function_of, takes_tis_bounds
from slime_ext.hosts.flags import ARGUMENTS, check_keys, check_kinds

LATE = (
    f"slime_ext: expected {INIT_FLAG} at start-up, got a first hook call without it: add the flag, because "
    "the configuration is checked only now, after the first rollout, and there are no guards and no metrics "
    "except those that the host logs itself (miles' --train-backend fsdp never calls it: use megatron)"
)
BOUNDS = (*BAND, *RANGE)  # a seed's function takes its bounds from these, not from the key slime_ext
NAMES = ("correct", *SEEDS, *presets.NAMES)  # the functions of slime_ext.tis


def near_function(name: str) -> str:
    """Suggests the function of ``slime_ext.tis`` that a wrong name may mean, for a message."""
    if name in ESTIMATORS:
        return f"; {name} is {presets.an_estimator(name)}"
    return did_you_mean(name, NAMES)


def setup_for(args: Any, function: str | None = None) -> Setup:
    """Loads and checks the setup of a run: flags, mapping and host.

    Args:
        function: a function of ``slime_ext.tis``: ``correct``; one of ``contract.SEEDS``, which take their
            bounds from the host's flags; or a preset, to which the mapping may only add. None: the function
            that the flags name, whether or not the host calls it.

    Raises:
        ConfigError: there is no configuration, it does not load, or it breaks a rule.
    """
    function, host = _named(args) if function is None else function, running.current()
    is_late = bool(function) and host is not None and not is_wrapped(host)
    if is_late:
        warn_once(LATE)
        check_kinds(args)
    is_init = host is not None and is_wrapped(host)
    is_ours = bool(function) or getattr(args, "slime_ext", None) is not None or is_init
    file, loss_type = _keys_of_file(args, is_ours=is_ours), _loss_type(args, host)
    trains = host is None or is_init  # without init, the flags alone tell what reaches the hook
    setup = loaded_from(Setup(args, function, file=file, pg_loss_type=loss_type, host=host, trains=trains))
    enforce(setup, ALL if is_late else OF_THE_CORRECTION)
    for note in setup.loaded.notes:
        warn_once(f"slime_ext: {note}")
    return setup


# The args of the last call that centers the host's loss, and whether that loss is PPO's.
LOSS_HAS_RATIO: Memory[tuple[Any, bool] | None] = Memory(lambda: None)


def loss_has_ratio(args: Any) -> bool:
    """Tells whether the host's policy loss is PPO's. Otherwise it is -A log pi_target.

    It asks the host once, because looking for the host takes half a millisecond.
    """
    known = LOSS_HAS_RATIO.value
    if known is None or known[0] is not args:
        host = running.current()
        known = args, Setup(args, pg_loss_type=_loss_type(args, host), host=host).has_ratio
        LOSS_HAS_RATIO.value = known
    return known[1]


def _loss_type(args: Any, host: running.Host | None) -> str | None:
    """Asks the host's ``get_pg_loss_type``. Returns None if the host has no such function."""
    says = getattr(host.loss, "get_pg_loss_type", None) if host else None
    try:
        return says(args) if says else None
    except ValueError as error:  # a file set a value that the host's parser would refuse
        raise ConfigError(f"--pg-loss-type: {error}") from None


def loaded_from(setup: Setup) -> Setup:
    """Adds the loaded configuration to a setup.

    If the launch names a function that is not ours, only guards and metrics are loaded, because slime_ext
    then measures beside it. Raises ConfigError as ``setup_for`` does.
    """
    require(setup, rules=OF_THE_FILE)
    function, mapping = setup.function, getattr(setup.args, "slime_ext", None)
    if function and function not in SEEDS:
        mapping = with_preset(mapping, None if function == "correct" else function)
    of_flags = _of_bounds(function, setup.args) if function in SEEDS else None
    if mapping is not None:
        return replace(setup, loaded=read_config(mapping, of_flags))
    return setup if of_flags is None else replace(setup, loaded=replace(setup.loaded, correction=of_flags))


def _of_bounds(function: str, args: Any) -> Correction:
    """Makes the correction of a seed's function from the host's flags.

    Its error messages name these flags.
    """
    low, high, eps_low, eps_high = (
        ARGUMENTS[name].default if (value := getattr(args, name, None)) is None else value for name in BOUNDS
    )
    of_range = function == "off_policy_is_function" and not takes_tis_bounds()
    numerator: Numerator = "target" if function == "off_policy_is_function" else "proximal"
    try:
        if of_range:
            eps_high = eps_low if eps_high is None else eps_high
            PpoClip(eps_low=eps_low, eps_high=_finite(eps_high))  # raises if the range is not allowed
            low, high = max(1 - eps_low, 0.0), 1 + eps_high
        else:
            same = "every weight would be the same"
            expect(low < high, "clip.high", f"more than --tis-clip-low {low}", high, same)
        bounds = _clip(low, high)  # raises if the bounds are not allowed, for a band too
        if function == "icepop_function":
            bounds = _band(low, high)
        return Correction(numerator, steps=(Reweight(), *bounds))
    except ConfigError as error:
        where, _, rest = str(error).partition(": ")
        fields = dict(zip(("low", "high", "eps_low", "eps_high"), BOUNDS, strict=True))
        other = "eps_clip" if of_range else "tis_clip"
        raise ConfigError(f"{flag_of(fields.get(where.rpartition('.')[2], other))}: {rest}") from None


def _clip(low: float, high: float) -> tuple[Step, ...]:
    """Makes the step that clips weights to the flags' bounds. An infinite bound does nothing."""
    if low == 0 and high == math.inf:
        return ()
    return (Clip(low, _finite(high)),)


def _finite(high: float) -> float:
    return LARGEST if high == math.inf else high


def _band(low: float, high: float) -> tuple[Step, ...]:
    """Makes the step that rejects tokens outside the flags' bounds. An infinite bound does nothing."""
    upper = None if high == math.inf else high
    return () if low == 0 and upper is None else (Reject("token", "ratio", "mean", low, upper),)


def _keys_of_file(args: Any, *, is_ours: bool) -> tuple[str, ...]:
    """Reads the top-level keys of --custom-config-path, if slime_ext runs and the file is here.

    Raises:
        ConfigError: a key is misspelt, so that slime ignores it.
    """
    path = getattr(args, "custom_config_path", None)
    if not (is_ours and isinstance(path, str) and Path(path).is_file()):
        return ()
    content = read_yaml(path, where := f"--custom-config-path {path}")
    keys = tuple(map(str, content)) if isinstance(content, Mapping) else ()
    check_keys(where, keys)
    return keys


def center_of_flags(args: Any) -> Center | None:
    """Returns the ``center`` of the correction that the flags name.

    It reads no file and asks no host, because the rollout's process calls it for each sample.
    """
    return loaded_from(Setup(args, _named(args))).loaded.correction.center


def _named(args: Any) -> str:
    name = function_of(args)
    return name if name in NAMES else ""
