"""The correction that a run's flags and its ``slime_ext:`` mapping describe, read once per args object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_ext import presets
from slime_ext.config import load_config
from slime_ext.correction import Correction
from slime_ext.errors import ConfigError
from slime_ext.host import carriers, hosts
from slime_ext.host.contract import CARRY
from slime_ext.host.guards import warn_once

LATE = (
    f"slime_ext: expected {CARRY} at start-up, got a first hook call without it: the configuration is "
    "checked only now, after the first rollout, and there are no metrics but those of the host's own channel"
)
FUNCTIONS = "slime_ext.tis"  # the module whose functions read the mapping

_loaded: dict[str | None, tuple[Any, Any, Correction]] = {}  # preset -> args, their mapping, correction


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
    if hosts.current() is not None and not carriers.is_installed():
        warn_once(LATE)
    correction = load_config(_with_preset(mapping, preset), args)
    _loaded[preset] = (args, mapping, correction)
    return correction


def _with_preset(mapping: Mapping[str, Any] | None, preset: str | None) -> Mapping[str, Any]:
    if preset is None:
        if mapping is None:
            raise ConfigError(
                "slime_ext: expected a mapping in --custom-config-path, got none: slime_ext.tis.correct "
                "reads its configuration there; or name a preset, as in --custom-tis-function-path "
                "slime_ext.tis.token_tis"
            )
        return mapping
    named = (mapping or {}).get("preset", preset)
    if named != preset:
        raise ConfigError(
            f"slime_ext.preset: expected {preset} (which --custom-tis-function-path names), got {named}: "
            "name one"
        )
    return {**(mapping or {}), "preset": preset}


def mapping_of_flags(args: Any) -> Mapping[str, Any]:
    """What stands under ``slime_ext:``, with the preset that the function's path names; {} for nothing."""
    mapping = getattr(args, "slime_ext", None) or {}
    module, _, name = (getattr(args, "custom_tis_function_path", None) or "").rpartition(".")
    named = module == FUNCTIONS and name in (*presets.PRESETS, *presets.ALIASES)
    return {"preset": name, **mapping} if named else mapping


def correction_of_flags(args: Any) -> Correction | None:
    """The correction that the hook will apply; None where the flags name no function that has one.

    Raises:
        ConfigError: as ``correction_for``.
    """
    if not (getattr(args, "use_tis", False) or getattr(args, "get_mismatch_metrics", False)):
        return None
    module, _, name = (getattr(args, "custom_tis_function_path", None) or "").rpartition(".")
    if module != FUNCTIONS:
        return None
    if name == "correct":
        return correction_for(args)
    return correction_for(args, name) if name in (*presets.PRESETS, *presets.ALIASES) else None
