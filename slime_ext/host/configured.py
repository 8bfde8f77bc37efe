"""The correction that a run's flags and its ``slime_ext:`` mapping describe, read once per args object."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from slime_ext import presets
from slime_ext.config import dialects
from slime_ext.config import load as config
from slime_ext.config.files import read_yaml
from slime_ext.config.load import load_config, with_preset
from slime_ext.core.correction import Correction
from slime_ext.core.losses import SURROGATES
from slime_ext.core.metrics.guards import Guard
from slime_ext.core.metrics.names import METRICS, STALENESS
from slime_ext.core.metrics.options import Options
from slime_ext.core.steps import Clip, Reject, Reweight
from slime_ext.errors import ConfigError, warn_once
from slime_ext.host import hosts
from slime_ext.host.contract import BAND, INIT_FLAG, OURS, RANGE, SEEDS, TIS, calls_hook, function_of
from slime_ext.host.flags import ARGUMENTS, check_command_line, check_flags, double_count

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
        ConfigError: no configuration at all, one that does not load, or one that the flags contradict.
    """
    reads = [getattr(args, name, None) for name in read_by(function)]
    owner, known, correction = _loaded.get(function, (None, None, None))
    if correction is None or owner is not args or known != reads:
        check_first_call(args)
        if function in SEEDS:
            correction = _of_bounds(function, args, *reads)
        else:
            preset = None if function == "correct" else function
            correction = load_config(with_preset(reads[0], preset), args)
        _loaded[function] = (args, reads, correction)
    return correction


def read_by(function: str) -> tuple[str, ...]:
    """The arguments that a function of ``slime_ext.tis`` is made from."""
    return BOUNDS if function in SEEDS else ("slime_ext",)


def _of_bounds(function: str, args: Any, *given: float | None) -> Correction:
    low, high, eps_low, eps_high = (
        ARGUMENTS[name].default if value is None else value for name, value in zip(BOUNDS, given, strict=True)
    )
    if function == "vanilla_tis_function":
        return Correction(steps=(Reweight(), Clip(low, high)))
    if function == "icepop_function":
        return Correction(steps=(Reweight(), Reject("token", "ratio", "mean", low, high)))
    if line := double_count(args):
        warn_once(line)
    bounds = Clip(max(1 - eps_low, 0.0), 1 + (eps_low if eps_high is None else eps_high))
    return Correction("target", steps=(Reweight(), bounds))


def check_first_call(args: Any) -> None:
    """What ``init`` would have checked of the flags, once per args object, in a host that did not call it.

    Raises:
        ConfigError: as ``check_flags``.
    """
    global _checked
    if args is _checked:
        return
    host = hosts.current()
    if host is not None and not host.is_wrapped:
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
    return correction_for(args, name) if name in ("correct", *SEEDS, *presets.NAMES) else None


def forbid_unread_key(args: Any) -> None:
    """Stops at a key ``slime_ext`` beside a function that does not read it.

    Raises:
        ConfigError: the function that the flags name is neither ``correct`` nor a preset.
    """
    keys = set(getattr(args, "slime_ext", None) or ()) - {"guards", "metrics"}  # init reads them in any case
    if function_of(args) not in ("correct", *presets.NAMES) and keys:
        raise ConfigError(
            f"--custom-tis-function-path: expected {TIS}.correct beside the key slime_ext, got "
            f"{getattr(args, 'custom_tis_function_path', None) or 'none'}: nothing would read that key"
        )


def forbid_misplaced(keys: Iterable[str]) -> None:
    """Stops at a key of ours beside ``slime_ext:`` in the file of --custom-config-path, as lost indentation
    leaves it: slime makes an argument of it, which nothing reads.

    Args:
        keys: those at the top of the file; the hosts' own arguments among them are none of ours.

    Raises:
        ConfigError: with the place where the key belongs.
    """
    for key in keys:
        if place := _places().get(key):
            raise ConfigError(
                f"--custom-config-path: expected the key {key} {place}, got it beside slime_ext, where "
                "nothing reads it: indent it; an argument of your own needs another name"
            )


def forbid_misplaced_in_file(args: Any) -> None:
    """The same of the file itself, where something of ours would have read it and this process can.

    Raises:
        ConfigError: as ``forbid_misplaced``, or no YAML.
    """
    path = getattr(args, "custom_config_path", None)
    is_ours = function_of(args) or getattr(args, "slime_ext", None) is not None
    if is_ours and isinstance(path, str) and Path(path).is_file():
        found = read_yaml(path, f"--custom-config-path {path}")
        forbid_misplaced(found if isinstance(found, Mapping) else ())


@functools.cache
def _places() -> dict[str, str]:
    """Every key of ours that is no argument of a host -> where it belongs."""
    found: dict[str, str] = {}
    for place, keys in _keys():
        found |= {key: place for key in keys if key not in found and key not in ARGUMENTS}
    return found


def _keys() -> Iterator[tuple[str, Iterable[str]]]:
    yield "under slime_ext", (*config.KEYS, *dialects.DIALECTS)
    yield "in a step's place under slime_ext.steps", config.KNOWN_STEPS
    yield "as a field of a step under slime_ext.steps", _fields(*config.KNOWN_STEPS.values())
    yield "under slime_ext.surrogate", (name for name, cls in SURROGATES.items() if fields(cls))
    yield "as a field under slime_ext.surrogate", _fields(*SURROGATES.values())
    yield "as a field of a metric under slime_ext.guards", _fields(Guard)
    yield "under slime_ext.metrics", _fields(Options)
    yield "under slime_ext.guards", (*METRICS, *STALENESS)
    for system, (keys, _) in dialects.DIALECTS.items():
        yield f"under slime_ext.{system}", keys


def _fields(*classes: type) -> list[str]:
    return [field.name for cls in classes for field in fields(cls)]


def correction_of_flags(args: Any) -> Correction | None:
    """The correction that the hook will apply; None where the flags call no function that has one.

    Raises:
        ConfigError: as ``correction_for``.
    """
    return correction_named(args) if calls_hook(args) else None
