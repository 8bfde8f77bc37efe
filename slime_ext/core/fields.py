"""Checks the values of a configuration's fields against their type hints.

A ``Correction`` that is made in Python and one that is read from YAML go through the same checks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from slime_ext.errors import ConfigError, cut, did_you_mean, shown

SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # normal numbers of float32, the dtype of weights
FLOAT32 = f"0, or a number of size {SMALLEST:.3g} to {LARGEST:.3g} (float32)"
MOST = 2**31 - 1  # the largest whole number of a field; tensors of counts are float32 or wider
PLAIN = {float, int, bool, NoneType}


def is_float32(number: float) -> bool:
    """Tells whether a number is in the normal range of float32.

    >>> is_float32(0), is_float32(-2.0), is_float32(1e40), is_float32(1e-40)
    (True, True, False, False)
    """
    return number == 0 or SMALLEST <= abs(number) <= LARGEST


def is_plain(hint: Any) -> bool:
    """Tells whether ``check_value`` can check a type hint: words, numbers, flags, None.

    >>> is_plain(Literal["a", "b"]), is_plain(float | None), is_plain(int), is_plain(list[int])
    (True, True, True, False)
    """
    if get_origin(hint) in (Union, UnionType):
        return set(get_args(hint)) <= PLAIN
    return get_origin(hint) is Literal or hint in PLAIN


def check_value(where: str, value: Any, hint: Any) -> None:
    """Raises ConfigError unless a value fits a plain hint.

    An int fits a hint of float; a bool fits neither int nor float.

    >>> check_value("mask_scope", "al", Literal["policy", "all"])
    Traceback (most recent call last):
    slime_ext.errors.ConfigError: mask_scope: expected 'policy' or 'all', got 'al'; did you mean 'all'?
    """
    if get_origin(hint) is Literal:
        words = get_args(hint)
        if not any(value is word or (isinstance(value, str) and value == word) for word in words):
            *others, last = map(repr, words)
            listed = f"{', '.join(others)} or {last}" if others else last
            near = did_you_mean(cut(value), words)
            raise ConfigError(f"{where}: expected {listed}, got {shown(value)}{near}")
        return
    if (fault := _fault(value, {hint, *get_args(hint)} & PLAIN)) is not None:
        raise ConfigError(f"{where}: expected {fault}, got {shown(value)}")


def _fault(value: Any, kinds: set[type]) -> str | None:
    """Says what a number or a flag should be. Returns None if it fits."""
    if value is None and NoneType in kinds:
        return None
    if bool in kinds:
        return None if isinstance(value, bool) else "true or false"
    if float in kinds:
        if isinstance(value, bool) or not isinstance(value, Real):
            return "a number"
        try:
            number = float(value)
        except OverflowError:  # an int that is larger than every float
            return FLOAT32
        if not math.isfinite(number):
            return "a finite number"
        return None if is_float32(number) else FLOAT32
    if isinstance(value, bool) or not isinstance(value, Integral):
        return "a whole number"
    return None if abs(int(value)) <= MOST else f"a whole number up to {MOST}"


def check_fields(where: str, thing: Any, of: type | None = None) -> None:
    """Raises ConfigError at the first field of a dataclass that does not fit its hint.

    Only plain hints are checked.

    Args:
        where: the prefix of a field's name in messages, with its dot; empty for no prefix.
        of: the class whose fields are checked; None: that of `thing`. A class that checks its fields
            passes itself, because a user's subclass may add fields of any kind.
    """
    for name, hint in _plain_hints(of or type(thing)).items():
        check_value(f"{where}{name}", getattr(thing, name), hint)


@functools.cache
def _plain_hints(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if is_plain(hints[f.name])}
