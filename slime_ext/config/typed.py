"""Builds the dataclasses that a configuration describes.

The class checks the values. Here, unknown keys are refused, numeric text becomes a number, and errors get the
full key. Nothing else is converted, because a conversion would hide a mistake.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from slime_ext.config.numbers import as_number
from slime_ext.core.fields import check_values
from slime_ext.errors import ConfigError, check_known, quoted

T = TypeVar("T")


def mapping_of(where: str, value: Any) -> Mapping[str, Any]:
    """Returns the value if it is a mapping, and an empty mapping for None.

    Raises ConfigError for anything else.
    """
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected a mapping, got {quoted(value)}: write {{key: value}}")
    return value or {}


def named(
    where: str, kind: str, entry: Any, known: Mapping[str, type], *, is_users_class: bool = False
) -> Any:
    """Builds the object that ``{name: {field: value}}`` describes.

    A name alone stands for ``{name: {}}``.

    Args:
        known: name -> class.
        is_users_class: whether to check the values here, because only our classes check them in the
            constructor.
    """
    if isinstance(entry, str):
        entry = {entry: {}}
    if not isinstance(entry, Mapping) or len(entry) != 1:
        raise ConfigError(
            f"{where}: expected one {kind} with its fields, got {quoted(entry)}: "
            "write {name: {field: value}}"
        )
    ((name, fields),) = entry.items()
    check_known(where, kind, name, sorted(known))
    if fields is not None and not isinstance(fields, Mapping):
        raise ConfigError(
            f"{where}.{name}: expected a mapping of its fields, got {quoted(fields)}: write {{field: value}}"
        )
    values = read(f"{where}.{name}", known[name], fields or {})
    if is_users_class:
        check_values(f"{where}.{name}.", known[name], values)
    return built(where, known[name], values)


_hints = functools.cache(get_type_hints)  # which evaluates each annotation anew


def read(where: str, cls: type, values: Mapping[str, Any], allowed: Sequence[str] = ()) -> dict[str, Any]:
    """Reads the values of a dataclass's fields, for its constructor to check.

    Unknown fields are refused. Numeric text becomes a number, and a list becomes a tuple, because YAML has no
    tuples.

    Args:
        allowed: the allowed fields; all of them by default.
    """
    known, hints = sorted(allowed or (f.name for f in dataclasses.fields(cls))), _hints(cls)
    for key in values:
        check_known(where, "key", key, known)
    return {key: _read(value, hints[key]) for key, value in values.items()}


def _read(value: Any, hint: Any) -> Any:
    if get_origin(hint) is tuple and isinstance(value, list):
        return tuple(value)
    return _number(value, hint)


def _number(value: Any, hint: Any) -> Any:
    """Converts numeric text to a number, and an int to a float if needed.

    YAML 1.1 reads 1e-4 as text, and users quote numbers.

    >>> _number("1e-4", float), _number("3", int | None), _number("3.5", int), _number("high", float)
    (0.0001, 3, '3.5', 'high')
    >>> _number(3, float | None), _number(3, int), _number(True, float)
    (3.0, 3, True)
    """
    wanted = {hint, *get_args(hint)} & {int, float}
    number = as_number(value) if wanted and isinstance(value, str | int) else None
    if number is None:
        return value
    if float in wanted:
        return number
    return int(number) if number.is_integer() else value


def read_fields(where: str, cls: type[T], values: Any) -> T:
    """Builds a dataclass from a mapping of its fields; None is an empty mapping."""
    return built(where, cls, read(where, cls, mapping_of(where, values)))


def built(where: str, make: Callable[..., T], fields: Mapping[str, Any]) -> T:
    """Calls ``make`` with the fields, and puts ``where`` before its errors."""
    try:
        return make(**fields)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}") from None
