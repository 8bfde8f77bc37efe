"""Decides which values of a configuration are numbers."""

from __future__ import annotations

import math
from typing import Any


def as_number(value: Any) -> float | None:
    """Reads a value as a finite float, or returns None.

    Text may be a number. A bool is not one, nor is text such as 1_0, which only Python reads as a number.

    >>> as_number("1e-4"), as_number(True), as_number("two"), as_number("nan"), as_number("1_0")
    (0.0001, None, None, None, None)
    >>> as_number(10**400)  # larger than any float
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and "_" in value:
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
