"""How a statement of a shell ends."""

from __future__ import annotations

from enum import Enum


class Flow(Enum):
    """How a statement ends: the next one follows, or it leaves a loop, a function, the script."""

    NEXT = 0
    CONTINUE = 1
    BREAK = 2
    RETURN = 3
    EXIT = 4
