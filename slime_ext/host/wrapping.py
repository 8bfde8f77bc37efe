"""Wraps functions of a host, and puts the host's own functions back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from slime_ext.hosts.code import LOSS
from slime_ext.hosts.running import Host

MARK = "_wrapped_by_slime_ext"


def wrap(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces a function of a module or a class with ``around(function)``; idempotent."""
    function = getattr(owner, name)
    if not hasattr(function, MARK):
        wrapper = functools.wraps(function)(around(function))
        setattr(wrapper, MARK, function)
        setattr(owner, name, wrapper)


def unwrap(owner: Any, *names: str) -> None:
    """Puts the host's own functions back; for tests."""
    for name in names:
        setattr(owner, name, getattr(getattr(owner, name), MARK, getattr(owner, name)))


def is_wrapped(host: Host) -> bool:
    """Tells whether ``init`` has wrapped the host's policy loss in this process."""
    return hasattr(getattr(host.loss, LOSS), MARK)
