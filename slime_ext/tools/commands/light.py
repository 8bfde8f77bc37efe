"""Functions of ours by name, imported when they are called: ``--help`` and a wrong flag need none of them."""

from __future__ import annotations

import importlib
from typing import Any


def call(path: str, *args: Any, **options: Any) -> Any:
    """Calls the function of ours at ``package.module:name``."""
    return imported(path)(*args, **options)


def imported(path: str) -> Any:
    """The function at ``package.module:name``."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
