"""Mapping -> Correction: typed, closed, and with one-line errors that carry the full key.

The mapping is what stands under the YAML key ``slime_ext:``. A step is ``{name: {field: value}}``, or just
its name; a surrogate likewise. ``preset`` fills what the mapping does not say itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_type_hints

from pydantic import ConfigDict, ValidationError, create_model

from slime_ext import presets
from slime_ext.correction import Correction
from slime_ext.errors import ConfigError, did_you_mean
from slime_ext.objectives import SURROGATES
from slime_ext.steps import STEPS

ROOT = "slime_ext"
CLOSED = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
PLAIN = ("numerator", "mask_scope", "on_nonfinite")
KEYS = ("preset", "surrogate", "steps", *PLAIN)


def load_config(mapping: Mapping[str, Any]) -> Correction:
    """The correction that a mapping describes.

    >>> load_config({"steps": ["reweight", {"truncate": {"high": 3.0}}]}).steps
    (Reweight(level='token'), Truncate(high=3.0))

    Args:
        mapping: keys ``preset``, ``numerator``, ``surrogate``, ``steps``, ``mask_scope``, ``on_nonfinite``.

    Raises:
        ConfigError: one line with the full key, what was expected, what was found and the nearest known name.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{ROOT}: expected a mapping, got {mapping!r}: see the files in configs/")
    for key in mapping:
        if key not in KEYS:
            raise ConfigError(_unknown(ROOT, "key", key, KEYS))
    fields = {}
    if "preset" in mapping:
        base = _preset(mapping["preset"])
        fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
    fields |= _checked(ROOT, Correction, {key: mapping[key] for key in PLAIN if key in mapping}, PLAIN)
    if "surrogate" in mapping:
        fields["surrogate"] = _named(f"{ROOT}.surrogate", "surrogate", mapping["surrogate"], SURROGATES)
    if "steps" in mapping:
        fields["steps"] = _steps(mapping["steps"])
    return _built(ROOT, Correction, fields)


def _preset(name: Any) -> Correction:
    if not isinstance(name, str):
        raise ConfigError(f"{ROOT}.preset: expected a name, got {name!r}")
    try:
        return presets.get(name)
    except ConfigError as error:
        raise ConfigError(f"{ROOT}.{error}") from None


def _steps(listed: Any) -> tuple:
    if not isinstance(listed, list | tuple):
        raise ConfigError(
            f"{ROOT}.steps: expected a list of steps, got {listed!r}: each step is its name with its fields"
        )
    return tuple(_named(f"{ROOT}.steps[{i}]", "step", entry, STEPS) for i, entry in enumerate(listed))


def _named(where: str, kind: str, entry: Any, known: Mapping[str, type]) -> Any:
    if isinstance(entry, str):
        entry = {entry: {}}
    if not isinstance(entry, Mapping) or len(entry) != 1:
        raise ConfigError(
            f"{where}: expected one {kind} with its fields, got {entry!r}: write {{name: {{field: value}}}}"
        )
    ((name, fields),) = entry.items()
    if name not in known:
        raise ConfigError(_unknown(where, kind, name, known))
    fields = {} if fields is None else fields
    if not isinstance(fields, Mapping):
        raise ConfigError(f"{where}.{name}: expected a mapping of its fields, got {fields!r}")
    cls = known[name]
    allowed = tuple(f.name for f in dataclasses.fields(cls))
    return _built(where, cls, _checked(f"{where}.{name}", cls, fields, allowed))


def _checked(where: str, cls: type, values: Mapping[str, Any], allowed: tuple[str, ...]) -> dict[str, Any]:
    """Values against the types of a dataclass: closed, and without conversions that would hide a mistake."""
    hints = get_type_hints(cls)
    model = create_model(cls.__name__, __config__=CLOSED, **{name: (hints[name], None) for name in allowed})
    try:
        return model.model_validate(dict(values)).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise ConfigError(_one_line(where, error, allowed)) from None


def _built(where: str, cls: type, fields: Mapping[str, Any]) -> Any:
    try:
        return cls(**fields)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}") from None


def _one_line(where: str, error: ValidationError, allowed: tuple[str, ...]) -> str:
    first = error.errors()[0]
    key = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return _unknown(where, "key", key, allowed)
    expected = first["msg"].removeprefix("Input should be ").replace("a valid ", "a ")
    return f"{where}.{key}: expected {expected}, got {first['input']!r}{_advice(first['input'])}"


def _advice(value: Any) -> str:
    """What a text that looks like a number was meant to be."""
    try:
        number = float(value) if isinstance(value, str) else None
    except ValueError:
        return ""
    if number is None:
        return ""
    return (
        f": YAML 1.1 reads it as text; write {number:.1e}"
        if "e" in value.lower()
        else ": take off the quotes"
    )


def _unknown(where: str, kind: str, name: Any, known: Any) -> str:
    names = ", ".join(sorted(known))
    return f"{where}: unknown {kind} '{name}'{did_you_mean(str(name), known)} (known: {names})"
