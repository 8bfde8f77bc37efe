"""Makes the correction that a launch's flags and its ``slime_ext:`` mapping describe."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from slime_ext import presets
from slime_ext.config.load import read_config, with_preset
from slime_ext.core.correction import Correction, Numerator
from slime_ext.core.fields import LARGEST
from slime_ext.core.losses import PpoClip
from slime_ext.core.state import Step
from slime_ext.core.steps import Clip, Reject, Reweight
from slime_ext.errors import ConfigError, did_you_mean, expect
from slime_ext.hosts.contract import BAND, RANGE, SLIME_FUNCTIONS, flag_of, function_of, takes_tis_bounds
from slime_ext.hosts.estimators import ESTIMATORS
from slime_ext.hosts.flags import ARGUMENTS
from slime_ext.rules.judge import OF_THE_FILE, require
from slime_ext.rules.setup import Setup

BOUNDS = (*BAND, *RANGE)  # a seed's function takes its bounds from these, not from the key slime_ext
NAMES = ("correct", *SLIME_FUNCTIONS, *presets.NAMES)  # the functions of slime_ext.tis


def near_function(name: str) -> str:
    """Suggests the function of ``slime_ext.tis`` that a wrong name may mean, for a message."""
    if name in ESTIMATORS:
        return f"; {name} is {presets.an_estimator(name)}"
    return did_you_mean(name, NAMES)


def named_function(args: Any) -> str:
    """Returns the function of ``slime_ext.tis`` that the flags name; empty if it is not one of these."""
    name = function_of(args)
    return name if name in NAMES else ""


def loaded_from(setup: Setup) -> Setup:
    """Adds the loaded configuration to a setup.

    If the launch names a function that is not ours, only guards and metrics are loaded, because slime_ext
    then measures beside it. Raises ConfigError as ``setup_for`` does.
    """
    require(setup, rules=OF_THE_FILE)
    function, mapping = setup.function, getattr(setup.args, "slime_ext", None)
    if function and function not in SLIME_FUNCTIONS:
        mapping = with_preset(mapping, None if function == "correct" else function)
    of_flags = _of_bounds(function, setup.args) if function in SLIME_FUNCTIONS else None
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
