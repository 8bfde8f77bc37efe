"""The correction that a run's flags and its ``slime_ext:`` mapping describe, read once per args object."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from slime_ext import presets
from slime_ext.config import load_config, with_preset
from slime_ext.correction import Correction
from slime_ext.host import host_hooks, hosts
from slime_ext.host.contract import CARRY, OURS, SEEDS, calls_hook, function_of
from slime_ext.host.flags import check_command_line, check_flags
from slime_ext.host.warnings import warn_of_double_count, warn_once
from slime_ext.steps import Clip, Reject, Reweight

WITHOUT = (
    "the configuration is checked only now, after the first rollout, and there are no guards and no metrics "
    "but those of the host's own channel"
)
LATE = f"slime_ext: expected {CARRY} at start-up, got a first hook call without it: {WITHOUT}"
UNCALLED = (
    f"slime_ext: expected a backend that calls {CARRY}, got one that does not (miles' --train-backend fsdp): "
    f"{WITHOUT}; what needs cur_log_probs or advantages stops here"
)

SEED_FLAGS = {
    "tis_clip_low": 0.0,
    "tis_clip": 2.0,
    "eps_clip": 0.2,
    "eps_clip_high": None,
}  # slime's defaults
_checked: Any = None
_loaded: dict[str | None, tuple[Any, Any, Correction]] = {}  # function -> args, what it reads, correction


def correction_for(args: Any, preset: str | None = None) -> Correction:
    """The correction that ``args.slime_ext`` describes, read once per args object.

    Args:
        preset: the preset that a flag names; the mapping may then only add to it.

    Raises:
        ConfigError: no configuration at all, one that does not load, or one that the flags contradict.
    """
    mapping = getattr(args, "slime_ext", None)
    owner, known, correction = _loaded.get(preset, (None, None, None))
    if correction is not None and owner is args and known is mapping:
        return correction
    check_first_call(args)
    correction = load_config(with_preset(mapping, preset), args)
    _loaded[preset] = (args, mapping, correction)
    return correction


def seed_correction(name: str, args: Any) -> Correction:
    """The correction of one of ``contract.SEEDS``, with the bounds that the host's flags give it; made once
    per args object.

    Raises:
        ConfigError: the flags' bounds do not keep on-policy tokens.
    """
    found = {flag: getattr(args, flag, None) for flag in SEED_FLAGS}
    bounds = tuple(default if found[flag] is None else found[flag] for flag, default in SEED_FLAGS.items())
    owner, known, correction = _loaded.get(name, (None, None, None))
    if correction is not None and owner is args and known == bounds:
        return correction
    check_first_call(args)
    tis_low, tis_high, eps_low, eps_high = bounds
    if name == "off_policy_is_function":
        warn_of_double_count(args)
        eps_high = eps_low if eps_high is None else eps_high
        correction = Correction("target", steps=(Reweight(), Clip(max(1 - eps_low, 0.0), 1 + eps_high)))
    else:
        bound = (
            Clip if name == "vanilla_tis_function" else functools.partial(Reject, "token", "ratio", "mean")
        )
        correction = Correction(steps=(Reweight(), bound(tis_low, tis_high)))
    _loaded[name] = (args, bounds, correction)
    return correction


def check_first_call(args: Any) -> None:
    """What ``init`` would have checked of the flags, once per args object, in a host that did not call it.

    Raises:
        ConfigError: as ``check_flags``.
    """
    global _checked
    if args is _checked:
        return
    if hosts.current() is not None and not host_hooks.is_installed():
        named = getattr(args, "custom_megatron_init_path", None)
        warn_once(UNCALLED if named == OURS["custom_megatron_init_path"] else LATE)
        check_command_line(hosts.command_line(), args)
        check_flags(args)
    _checked = args


def mapping_of_flags(args: Any) -> Mapping[str, Any]:
    """What stands under ``slime_ext:``, with the preset that the function's path names; {} for nothing."""
    mapping, name = getattr(args, "slime_ext", None) or {}, function_of(args)
    return {"preset": name, **mapping} if name in presets.NAMES else mapping


def correction_named(args: Any) -> Correction | None:
    """The correction of the function that the flags name; None where it has none, or is another's.

    Raises:
        ConfigError: as ``correction_for``.
    """
    name = function_of(args)
    if name == "correct":
        return correction_for(args)
    if name in SEEDS:
        return seed_correction(name, args)
    return correction_for(args, name) if name in presets.NAMES else None


def correction_of_flags(args: Any) -> Correction | None:
    """The correction that the hook will apply; None where the flags call no function that has one.

    Raises:
        ConfigError: as ``correction_for``.
    """
    return correction_named(args) if calls_hook(args) else None
