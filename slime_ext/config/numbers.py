"""Numbers in a configuration: which text is a number, and which numbers fit float32."""

from __future__ import annotations

import math
from typing import Any

SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # normal numbers of float32, in which weights are
FLOAT32 = f"0, or a number of size {SMALLEST:.3g} to {LARGEST:.3g} (float32)"


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


def is_float32(number: float) -> bool:
    """Whether a number is in the normal range of float32.

    >>> is_float32(0), is_float32(-2.0), is_float32(1e40), is_float32(1e-40)
    (True, True, False, False)
    """
    return number == 0 or SMALLEST <= abs(number) <= LARGEST
