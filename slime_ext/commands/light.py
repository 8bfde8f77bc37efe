"""Modules that know names and rules, imported without torch, whose import alone takes longer than a mistake
may cost.

What is asked of them computes nothing, so a stand-in with the names that they look at while they are
defined is enough. Nothing of it stays in ``sys.modules``; a process that has torch already uses it.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any, TypeVar

Result = TypeVar("Result")


@contextmanager
def module(name: str) -> Iterator[Any]:
    """A module of ours, quickly; what it gives may be used inside the ``with`` block alone."""
    if "torch" in sys.modules:
        yield importlib.import_module(name)
        return
    before = set(sys.modules)
    sys.modules["torch"] = _stand_in()
    try:
        yield importlib.import_module(name)
    finally:
        for passing in sorted(set(sys.modules) - before):
            if passing == "torch" or passing.startswith("slime_ext."):
                del sys.modules[passing]
                _forget(passing)


def config() -> AbstractContextManager[Any]:
    """``slime_ext.config``, as ``module`` does."""
    return module("slime_ext.config")


def with_module(name: str, use: Callable[[Any], Result]) -> Result:
    """What ``use`` makes of a module of ours; with torch where a configuration names a step of the user's own
    module, which has to be tried."""
    try:
        with module(name) as found:
            return use(found)
    except ModuleNotFoundError as error:
        if error.name != "torch" or "torch" in sys.modules:
            raise
    importlib.import_module("torch")
    with module(name) as found:
        return use(found)


def _forget(module: str) -> None:
    """A package keeps its modules as attributes, too."""
    package, _, name = module.rpartition(".")
    if package in sys.modules:
        vars(sys.modules[package]).pop(name, None)


def _stand_in() -> ModuleType:
    """What they look at while they are defined; nothing of it computes."""
    torch = _StandIn("torch")
    torch.Tensor, torch.device, torch.dtype, torch.inf = object, object, object, math.inf
    torch.no_grad = lambda: lambda function: function
    return torch


class _StandIn(ModuleType):
    """A module that has every name, such as torch.int64 in a signature."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return object()
