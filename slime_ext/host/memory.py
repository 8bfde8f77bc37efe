"""Keeps what slime_ext remembers of a run between two calls in one process.

Each module declares what it remembers, beside the code that reads it:

    REPORTERS: Memory[list[Reporter]] = Memory(list)

``everything`` lists all of it, and a test forgets all of it with ``forget``. There are three exceptions.
``errors.warn_once`` has its own cache, because code below ``host`` warns too. A context variable is reset by
the function that sets it. Caches of functions whose result never changes need no reset.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from slime_ext.errors import warn_once

T = TypeVar("T")
everything: list[Memory[Any]] = []


class Memory(Generic[T]):
    """One thing that this process remembers.

    Args:
        empty: makes the value of a new process.
    """

    def __init__(self, empty: Callable[[], T]) -> None:
        self.empty = empty
        self.value = empty()
        everything.append(self)


def forget() -> None:
    """Forgets everything, as in a new process; for tests."""
    for each in everything:
        each.value = each.empty()
    warn_once.cache_clear()
