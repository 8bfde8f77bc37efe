"""Weight versions as a sample names them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def versions_of(value: Any) -> tuple[Any, ...]:
    """The versions of a sample: a list in slime, a single one from a custom generate function, or none.

    >>> versions_of(["1", "2"]), versions_of(None), versions_of("12")
    (('1', '2'), (), ('12',))
    """
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
