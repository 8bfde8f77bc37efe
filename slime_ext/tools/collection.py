"""Pauses Python's search for reference cycles where it finds none and takes long."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Pauses the search, which looks at each new object again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def importing(module: str) -> Iterator[None]:
    """Pauses the search during imports, and exempts what they made from every later search.

    torch makes 170,000 objects that live as long as the process. Each full search, the last one at the exit
    too, would visit all of them.

    Args:
        module: what the imports load; if it is loaded already, nothing is exempted.
    """
    is_new = module not in sys.modules
    with paused():
        yield
        if is_new:
            gc.freeze()
