"""Weight versions as a sample names them."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

MOST_DIGITS = 18  # of a version: what an int64 holds


def versions_of(value: Any) -> tuple[Any, ...]:
    """The versions of a sample: a list in slime, a single one from a custom generate function, or none.

    >>> versions_of(["1", "2"]), versions_of(None), versions_of("12")
    (('1', '2'), (), ('12',))
    """
    if value is None:
        return ()
    several = isinstance(value, Iterable) and not isinstance(value, str) and getattr(value, "ndim", 1)
    return tuple(value) if several else (value,)


def number_of(version: Any) -> int | None:
    """A version's number, as slime writes it; None for any other name, as of an engine before its first push.

    >>> number_of("12"), number_of(12), number_of("default"), number_of("\u00b2")
    (12, 12, None, None)
    """
    text = str(version) if isinstance(version, (str, Integral)) else ""
    return int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else None
