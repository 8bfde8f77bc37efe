"""Runs functions before or after a module is imported, and wraps functions of a module.

Nothing is imported early, so a process that never imports a module pays nothing for its hook.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections import defaultdict
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

When = Literal["before", "after"]


def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Decorates a function that replaces `owner.name` and gets the original as its first argument."""
    original = getattr(owner, name)

    def put(function: Callable[..., Any]) -> None:
        @functools.wraps(original)
        def call(*args: Any, **options: Any) -> Any:
            return function(original, *args, **options)

        setattr(owner, name, call)

    return put


class ImportHooks(importlib.abc.MetaPathFinder):
    """Runs each added call once, when its module is first imported."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, When], list[Callable[[ModuleType], None]]] = defaultdict(list)
        self._names: set[str] = set()

    def add(self, when: When, module: str, call: Callable[[ModuleType], None]) -> None:
        """Registers `call(module)` to run just before or just after the module is executed."""
        self._names.add(module)
        self._calls[module, when].append(call)

    def install(self) -> None:
        """Puts the hooks ahead of every other import finder of this process."""
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the other finders' spec, with the added calls around the module's execution."""
        if name not in self._names:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((s for f in others if (s := f.find_spec(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = functools.partial(self._execute, name, execute)
        return spec

    def _execute(self, name: str, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        self._names.discard(name)
        for call in self._calls.pop((name, "before"), ()):
            call(module)
        execute(module)
        for call in self._calls.pop((name, "after"), ()):
            call(module)
