"""Modules that know names and rules, imported without torch, whose import alone takes longer than a mistake
may cost. A process that has torch already uses it."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any


class _StandIn(ModuleType):
    """A torch with every name that our modules look at while they are defined; nothing of it computes."""

    Tensor, device, dtype, inf = object, object, object, math.inf
    of_function = SimpleNamespace(once_differentiable=lambda function: function)
    autograd = SimpleNamespace(Function=object, function=of_function)

    def no_grad(self) -> Any:
        return lambda function: function

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return object()


@contextmanager
def without_torch() -> Iterator[None]:
    """Has a stand-in where torch would be; behind the ``with`` block it and what was imported are gone."""
    if "torch" in sys.modules:
        yield
        return
    before = set(sys.modules)
    sys.modules["torch"] = _StandIn("torch")
    try:
        yield
    finally:
        for passing in sorted(set(sys.modules) - before):
            if passing == "torch" or passing.startswith("slime_ext."):
                del sys.modules[passing]
                package, _, name = passing.rpartition(".")  # which keeps it as an attribute, too
                if package in sys.modules:
                    vars(sys.modules[package]).pop(name, None)


def call(path: str, *args: Any) -> Any:
    """What the function of ours at ``package.module:name`` gives without torch; with it where a configuration
    names a step of the user's own module, which has to be tried."""
    try:
        with without_torch():
            return imported(path)(*args)
    except ModuleNotFoundError as error:
        if error.name != "torch" or "torch" in sys.modules:
            raise
    importlib.import_module("torch")
    return imported(path)(*args)


def imported(path: str) -> Any:
    """The function at ``package.module:name``."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
