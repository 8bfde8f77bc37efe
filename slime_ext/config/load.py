"""Turns a mapping into a ``Correction``.

The mapping is the value of the YAML key ``slime_ext:``. Values are checked against types, unknown keys are
refused, and each error is one line that names the full key. A step is ``{name: {field: value}}``, or just
its name; a name with dots is a class in a user's module. Surrogates are written the same way. ``preset``
fills in missing keys. ``slime-ext convert`` translates the blocks of other systems into these keys.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from slime_ext import presets
from slime_ext.aliases import ALIASES
from slime_ext.config.files import is_file_name, read_mapping
from slime_ext.config.foreign import SYSTEMS
from slime_ext.config.idle import forbid_idle_guards, notes_of
from slime_ext.config.typed import built, mapping_of, named, read, read_fields
from slime_ext.core.centering import Center
from slime_ext.core.correction import Correction
from slime_ext.core.importing import load_named
from slime_ext.core.losses import SURROGATES
from slime_ext.core.metrics import guards
from slime_ext.core.metrics.guards import Guard
from slime_ext.core.metrics.names import known_names
from slime_ext.core.metrics.options import Options
from slime_ext.core.prefix_steps import PREFIX_STEPS
from slime_ext.core.scoped import FORMS
from slime_ext.core.state import Step
from slime_ext.core.steps import STEPS
from slime_ext.core.terms import TERMS
from slime_ext.errors import ConfigError, check_known, cut, expect, quoted, warn_once

__all__ = ["Loaded", "block_of", "load_config", "read_config", "to_mapping", "with_preset"]

ROOT = "slime_ext"
PLAIN = ("numerator", "mask_scope", "denominator", "group", "on_nonfinite")
OF_A_HOST = ("guards", "metrics")
KEYS = ("preset", "surrogate", "steps", "terms", "center", *PLAIN, *OF_A_HOST)
KNOWN_STEPS: dict[str, Any] = {**STEPS, **PREFIX_STEPS, **FORMS}


@dataclass(frozen=True)
class Loaded:
    """Holds what a mapping describes: the correction, its guards and metrics, and notes for the user."""

    correction: Correction
    notes: tuple[str, ...] = ()
    guards: Mapping[str, Guard] = field(default_factory=lambda: guards.DEFAULT)
    metrics: Options = field(default_factory=Options)


def load_config(config: Mapping[str, Any] | str | Path) -> Correction:
    """Loads the correction that a mapping or a YAML file describes.

    Parts of the mapping that have no effect are logged once.

    >>> load_config({"steps": ["reweight", {"truncate": {"high": 3.0}}]}).steps
    (Reweight(level='token'), Truncate(high=3.0))
    >>> load_config("configs/modes/pure_is.yaml") == load_config({"preset": "pure_is"})
    True

    Args:
        config: native keys, or the path of a file with them. They may be under ``slime_ext:``, as in a host's
            file.

    Raises:
        ConfigError: one line with the full key, what was expected, what was found and the nearest known name.
    """
    block = block_of(config)
    loaded = read_config(block)
    for key in (key for key in OF_A_HOST if key in block):
        warn_once(f"{ROOT}.{key}: ignored here, because only a host reads {key}")
    for note in loaded.notes:
        warn_once(f"{ROOT}: {note}")
    return loaded.correction


def block_of(config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """Finds our keys in a mapping, or in the YAML file at a path.

    They are the keys under ``slime_ext:``, if the mapping has that key. The mapping may be OmegaConf's, as in
    a program that Hydra runs.

    Raises:
        ConfigError: the file cannot be read, OmegaConf cannot resolve a value, or one of our keys is beside
            ``slime_ext:``.
    """
    mapping: Any = read_mapping(str(config)) if is_file_name(config) else _plain(config)
    block = _as_mapping(mapping.get(ROOT, mapping) if isinstance(mapping, Mapping) else mapping)
    for key in (key for key in KEYS if block is not mapping and key in mapping):
        raise ConfigError(f"{key}: expected it under {ROOT}, got it beside {ROOT}: indent it")
    return block


def _as_mapping(block: Any) -> Mapping[str, Any]:
    """Returns the keys. Raises ConfigError if they are no mapping."""
    if isinstance(block, Mapping):
        return block
    is_preset = isinstance(block, str) and block in presets.NAMES
    todo = f"write {{preset: {block}}}" if is_preset else "see the files in configs/"
    raise ConfigError(f"{ROOT}: expected a mapping, got {quoted(block)}: {todo}")


def _plain(config: Any) -> Any:
    """Turns OmegaConf's mappings and lists into Python's, with their values resolved.

    Only a process that has imported OmegaConf can pass one, so this does not import it.
    """
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is None or not omegaconf.OmegaConf.is_config(config):
        return config
    try:
        return omegaconf.OmegaConf.to_container(config, resolve=True)
    except omegaconf.errors.OmegaConfBaseException as error:
        raise ConfigError(
            f"{error.full_key or ROOT}: expected a value that OmegaConf can resolve, got "
            f"{type(error).__name__}: define what its ${{...}} names"
        ) from None


def read_config(mapping: Mapping[str, Any], instead: Correction | None = None) -> Loaded:
    """Reads a mapping as ``load_config`` does, but returns guards, metrics and notes, too.

    Args:
        instead: the correction that runs and that guards watch, if it is not the mapping's own.

    Raises ConfigError as ``load_config`` does.
    """
    mapping = _as_mapping(mapping)
    if "backend" in mapping:
        raise ConfigError(
            f"{ROOT}.backend: expected no such key, got one: delete it, because every correction now runs "
            "eagerly"
        )
    for system in (key for key in mapping if key in SYSTEMS):
        raise ConfigError(
            f"{ROOT}.{system}: expected native keys, got another system's block: run slime-ext convert "
            f"--from {system} FILE, which prints native keys"
        )
    described = _native(mapping)
    correction = described if instead is None else instead
    options = read_fields(f"{ROOT}.metrics", Options, mapping.get("metrics"))
    watched = _guards(mapping.get("guards"), correction, options)
    _forbid_unmeasured(mapping, correction, options)
    notes = tuple(notes_of(mapping, correction))
    return Loaded(correction, notes, guards=watched, metrics=options)


def with_preset(mapping: Any, preset: str | None) -> Any:
    """Completes the mapping for a function of ``slime_ext.tis``: ``correct``, or a preset.

    Args:
        mapping: the value of ``slime_ext:``, None if there is none; its keys replace those of the preset.
        preset: the name of the function; None for ``correct``.

    Raises:
        ConfigError: ``correct`` has nothing to read, or the mapping names another preset than the function.
    """
    if preset is None and mapping is None:
        raise ConfigError(
            f"{ROOT}: expected a mapping in --custom-config-path, got none: write one, because "
            "slime_ext.tis.correct reads it, or name a preset: --custom-tis-function-path "
            "slime_ext.tis.token_tis"
        )
    keys = {} if mapping is None else mapping
    if preset is None or not isinstance(keys, Mapping):
        return keys
    if not _is_same_preset(keys.get("preset", preset), preset):
        raise ConfigError(
            f"{ROOT}.preset: expected {preset} (which --custom-tis-function-path names), got "
            f"{cut(keys['preset'])}: remove the key preset"
        )
    return {**keys, "preset": preset}


def _is_same_preset(name: Any, preset: str) -> bool:
    return isinstance(name, str) and ALIASES.get(name, name) == ALIASES.get(preset, preset)


def to_mapping(correction: Correction) -> dict[str, Any]:
    """Writes a correction as native keys, which ``load_config`` reads back.

    >>> to_mapping(load_config({"preset": "token_tis"}))["steps"]
    [{'reweight': {'level': 'token'}}, {'truncate': {'high': 2.0}}]
    """
    tables = (STEPS, PREFIX_STEPS, FORMS, SURROGATES, TERMS, {"center": Center})
    names = {cls: name for table in tables for name, cls in table.items()}

    def described(thing: Any) -> dict[str, Any]:
        values = {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing)}
        name = names.get(type(thing)) or f"{type(thing).__module__}.{type(thing).__qualname__}"
        written = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        return {name: {key: value for key, value in written.items() if value is not None}}

    surrogate, center = described(correction.surrogate), correction.center
    terms = [described(term) for term in correction.terms]
    added: dict[str, Any] = {"terms": terms} if terms else {}
    added |= {} if center is None else described(center)
    return {
        "numerator": correction.numerator,
        "surrogate": surrogate if any(surrogate.values()) else next(iter(surrogate)),
        "steps": [described(step) for step in correction.steps],
        **added,
        "mask_scope": correction.mask_scope,
        "denominator": correction.denominator,
        "group": correction.group,
        "on_nonfinite": correction.on_nonfinite,
    }


def _native(mapping: Mapping[str, Any]) -> Correction:
    for key in mapping:
        check_known(ROOT, "key", key, sorted(KEYS))
    base = _preset(mapping["preset"]) if "preset" in mapping else Correction()
    fields = read(ROOT, Correction, {key: mapping[key] for key in PLAIN if key in mapping}, PLAIN)
    if "surrogate" in mapping:
        fields["surrogate"] = named(f"{ROOT}.surrogate", "surrogate", mapping["surrogate"], SURROGATES)
    if "steps" in mapping:
        fields["steps"] = _steps(mapping["steps"])
    if "terms" in mapping:
        fields["terms"] = _terms(mapping["terms"])
    if "center" in mapping:
        fields["center"] = _center(mapping["center"])
    return built(ROOT, partial(dataclasses.replace, base), fields)


def _center(mapping: Any) -> Center | None:
    """Reads ``center``. None removes the center of a preset."""
    where = f"{ROOT}.center"
    if mapping is None:
        return None
    return built(ROOT, Center, read(where, Center, mapping_of(where, mapping)))  # its messages name center


def _forbid_unmeasured(mapping: Mapping[str, Any], correction: Correction, options: Options) -> None:
    """Refuses guards and ``on_nonfinite: raise`` if ``metrics.enabled`` is false."""
    reads = {"guards": mapping.get("guards"), "on_nonfinite: raise": correction.on_nonfinite == "raise"}
    for key in (key for key, is_there in reads.items() if is_there and not options.enabled):
        raise ConfigError(
            f"{ROOT}.metrics.enabled: expected true beside {key}, got false: set it to true, or remove {key}"
        )


def _guards(mapping: Any, correction: Correction, options: Options) -> dict[str, Guard]:
    """Reads ``guards``: the mapping replaces default guards, and None removes one."""
    where = f"{ROOT}.guards"
    watched, known = dict(guards.DEFAULT), known_names(correction)
    changes = mapping_of(where, mapping)
    for name, fields in changes.items():
        watched.pop(name, None)
        if fields is not None:
            watched[name] = read_fields(f"{where}.{name}", Guard, fields)
    for name in (*changes, *watched):
        check_known(where, "metric", name, known)
    changed = {name: watched[name] for name in changes if name in watched}
    forbid_idle_guards(changed, correction, options, where)
    return watched


def _preset(name: Any) -> Correction:
    if not isinstance(name, str):
        raise ConfigError(
            f"{ROOT}.preset: expected a name, got {quoted(name)}: slime-ext presets lists the names"
        )
    return built(ROOT, presets.get, {"name": name})


def _steps(listed: Any) -> tuple[Step, ...]:
    if not isinstance(listed, list | tuple):
        raise ConfigError(
            f"{ROOT}.steps: expected a list of steps, got {quoted(listed)}: write "
            "[{name: {field: value}}, ...]"
        )
    steps = [_step(f"{ROOT}.steps[{i}]", entry) for i, entry in enumerate(listed)]
    return tuple(step.plain() if hasattr(step, "plain") else step for step in steps)


def _terms(listed: Any) -> tuple[Any, ...]:
    where = f"{ROOT}.terms"
    if not isinstance(listed, list | tuple):
        raise ConfigError(
            f"{where}: expected a list of terms, got {quoted(listed)}: "
            "write [{name: {field: value}}, ...]"
        )
    return tuple(named(f"{where}[{i}]", "term", entry, TERMS) for i, entry in enumerate(listed))


def _step(where: str, entry: Any) -> Step:
    """Builds a built-in step, or a user's own step if the name has dots."""
    name = next(iter(entry), None) if isinstance(entry, Mapping) else entry
    step: Step
    if not isinstance(name, str) or "." not in name:
        step = named(where, "step", entry, KNOWN_STEPS)
        return step
    from slime_ext.testing import steps as user_steps  # loaded only for a user's own step

    made_from = {name: _user_class(name, f"{where} {name}")}
    try:
        step = named(where, "step", entry, made_from, is_users_class=True)
    except Exception as error:  # from the user's class: a missing field, its __post_init__ or a type hint
        raise user_steps.failed(f"{where}.{name}", error) from error
    user_steps.check_step(step, where=f"{where}.{name}")
    return step


def _user_class(path: str, where: str) -> type[Step]:
    """Imports the step class at ``package.module.Class``.

    Raises:
        ConfigError: the class cannot be imported, or is not a frozen dataclass derived from
            ``slime_ext.steps.Step``.
    """
    cls = load_named(path, where, "class")
    is_step = isinstance(cls, type) and issubclass(cls, Step)
    got = f"the class {cls.__name__}" if isinstance(cls, type) else f"a {type(cls).__name__}"
    expect(is_step, where, "a class derived from slime_ext.steps.Step", got, "name the class")
    parameters = getattr(cls, "__dataclass_params__", None)
    is_frozen = parameters is not None and parameters.frozen and "__dataclass_fields__" in vars(cls)
    why = "write it there, because the fields of a step are its configuration and identify it"
    expect(is_frozen, where, "@dataclass(frozen=True) above the class", "none", why)
    step: type[Step] = cls
    return step
