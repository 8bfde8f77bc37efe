"""Functions that run before or after a module is imported, and modules made where none is installed.

Nothing is imported early: a process that never imports a module pays nothing for its hook.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections import defaultdict
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

When = Literal["before", "after", "make"]


class ImportHooks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Runs each added call once, when its module is first imported."""

    def __init__(self) -> None:
        self._calls: dict[str, dict[When, list[Callable[..., Any]]]] = {}

    def add(self, when: When, module: str, call: Callable[..., Any]) -> None:
        """Adds a call.

        Args:
            when: "before": `call()` just before the module is imported; "after": `call(module)` as soon as it
                has been executed; "make": where none is installed, an import gets an empty package that
                `call(module)` has filled.
        """
        self._calls.setdefault(module, defaultdict(list))[when].append(call)

    def install(self) -> None:
        """Puts the hooks ahead of every other finder of this process."""
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's spec from the other finders, with the added calls around its execution."""
        if name not in self._calls:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((s for f in others if (s := f.find_spec(name, path, target)) is not None), None)
        if spec is None and self._calls[name]["make"]:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = self._around(name, spec.loader.exec_module)
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Fills a module that is not installed."""
        for fill in self._calls[module.__name__]["make"]:
            fill(module)

    def _around(self, name: str, execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        def exec_module(module: ModuleType) -> None:
            calls = self._calls.pop(name, None) or defaultdict(list)
            for call in calls["before"]:
                call()
            execute(module)
            for call in calls["after"]:
                call(module)

        return exec_module
