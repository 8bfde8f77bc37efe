"""Numbers in a configuration: which text is one."""

from __future__ import annotations

import math
from typing import Any


def as_number(value: Any) -> float | None:
    """A finite float, or None. Text counts; booleans, and text that only Python reads as a number, do not.

    >>> as_number("1e-4"), as_number(True), as_number("two"), as_number("nan"), as_number("1_0")
    (0.0001, None, None, None, None)
    >>> as_number(10**400)  # more than a float can be
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and "_" in value:
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None
