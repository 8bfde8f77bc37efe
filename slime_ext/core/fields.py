"""Checks the values of a configuration's fields against their type hints.

A ``Correction`` that is made in Python and one that is read from YAML go through the same checks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from slime_ext.errors import ConfigError, cut, did_you_mean, quoted

SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # normal numbers of float32, the dtype of weights
FLOAT32 = f"0, or a number of size {SMALLEST:.3g} to {LARGEST:.3g} (float32)"
MOST = 2**31 - 1  # the largest whole number of a field; tensors of counts are float32 or wider
PLAIN = {float, int, bool, str, NoneType}


def is_float32(number: float) -> bool:
    """Tells whether a number is in the normal range of float32.

    >>> is_float32(0), is_float32(-2.0), is_float32(1e40), is_float32(1e-40)
    (True, True, False, False)
    """
    return number == 0 or SMALLEST <= abs(number) <= LARGEST


def is_plain(hint: Any) -> bool:
    """Tells whether ``check_value`` can check a type hint: words, numbers, flags, text, None.

    >>> is_plain(Literal["a", "b"]), is_plain(float | None), is_plain(int), is_plain(list[int])
    (True, True, True, False)
    """
    return all(get_origin(kind) is Literal or kind in PLAIN for kind in _kinds(hint))


def _kinds(hint: Any) -> tuple[Any, ...]:
    """Lists the members of a union; any other hint is its only member."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def check_value(where: str, value: Any, hint: Any) -> None:
    """Raises ConfigError unless a value fits a plain hint.

    An int fits a hint of float; a bool fits neither int nor float.

    >>> check_value("mask_scope", "al", Literal["policy", "all"])
    Traceback (most recent call last):
    slime_ext.errors.ConfigError: mask_scope: expected 'policy' or 'all', got 'al'; did you mean 'all'?
    """
    kinds = _kinds(hint)
    faults = [_fault(value, kind) for kind in kinds]
    if None in faults:
        return
    wanted = " or ".join(fault for fault in faults if fault and fault != "nothing")
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    raise ConfigError(f"{where}: expected {wanted}, got {quoted(value)}{did_you_mean(cut(value), words)}")


def _fault(value: Any, kind: Any) -> str | None:
    """Says what a value should be to fit one member of a plain hint. Returns None if it fits."""
    if get_origin(kind) is Literal:
        words = get_args(kind)
        fits = any(value is word or (isinstance(value, str) and value == word) for word in words)
        *others, last = map(repr, words)
        listed = f"{', '.join(others)} or {last}" if others else last
        return None if fits else listed
    is_bool = isinstance(value, bool)
    if kind is float:
        return _fault_of_float(value)
    fits, wanted = {
        NoneType: (value is None, "nothing"),
        bool: (is_bool, "true or false"),
        str: (isinstance(value, str), "a string"),
        int: (isinstance(value, Integral) and not is_bool, "a whole number"),
    }[kind]
    if not fits:
        return wanted
    return f"a whole number up to {MOST}" if kind is int and abs(value) > MOST else None


def _fault_of_float(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, Real):
        return "a number"
    try:
        number = float(value)
    except OverflowError:  # an int that is larger than every float
        return FLOAT32
    if not math.isfinite(number):
        return "a finite number"
    return None if is_float32(number) else FLOAT32


def check_fields(where: str, thing: Any, of: type | None = None) -> None:
    """Raises ConfigError at the first field of a dataclass that does not fit its hint.

    Only plain hints are checked.

    Args:
        where: the prefix of a field's name in messages, with its dot; empty for no prefix.
        of: the class whose fields are checked; None: that of `thing`. A class that checks its fields
            passes itself, because a user's subclass may add fields of any kind.
    """
    cls = of or type(thing)
    check_values(where, cls, {name: getattr(thing, name) for name in _plain_hints(cls)})


def check_values(where: str, cls: type, values: Mapping[str, Any]) -> None:
    """Raises ConfigError at the first value that does not fit the plain hint of a dataclass's field.

    Args:
        where: as for ``check_fields``.
        values: name of a field -> its value.
    """
    hints = _plain_hints(cls)
    for name, value in values.items():
        if name in hints:
            check_value(f"{where}{name}", value, hints[name])


@functools.cache
def _plain_hints(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if is_plain(hints[f.name])}
