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


class ImportHooks(importlib.abc.MetaPathFinder):
    """Calls what `before`, `after` and `make` registered, each once, when the module is first imported."""

    def __init__(self) -> None:
        self._before: dict[str, list[Callable[[], None]]] = defaultdict(list)
        self._after: dict[str, list[Callable[[ModuleType], None]]] = defaultdict(list)
        self._make: dict[str, Callable[[ModuleType], None]] = {}

    def before(self, module: str, call: Callable[[], None]) -> None:
        """Calls `call()` just before `module` is imported."""
        self._before[module].append(call)

    def after(self, module: str, call: Callable[[ModuleType], None]) -> None:
        """Calls `call(module)` as soon as `module` has been executed."""
        self._after[module].append(call)

    def make(self, module: str, fill: Callable[[ModuleType], None]) -> None:
        """Where no `module` is installed, an import gets an empty package that `fill` has filled."""
        self._make[module] = fill

    def install(self) -> None:
        """Puts the hooks before every other finder of this process."""
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's spec from the other finders, with the registered calls around its execution."""
        if name not in self._before and name not in self._after and name not in self._make:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((s for f in others if (s := f.find_spec(name, path, target)) is not None), None)
        if spec is None and name in self._make:
            return importlib.machinery.ModuleSpec(name, _Maker(self._make[name]), is_package=True)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = self._around(name, spec.loader.exec_module)
        return spec

    def _around(self, name: str, execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        def exec_module(module: ModuleType) -> None:
            for call in self._before.pop(name, ()):
                call()
            execute(module)
            for call in self._after.pop(name, ()):
                call(module)

        return exec_module


class _Maker(importlib.abc.Loader):
    """Executes a module by filling it."""

    def __init__(self, fill: Callable[[ModuleType], None]) -> None:
        self._fill = fill

    def exec_module(self, module: ModuleType) -> None:
        self._fill(module)
