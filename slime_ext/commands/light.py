"""The configuration rooms without torch, whose import alone takes longer than a check may.

Configuration computes nothing, so a stand-in with the names that those rooms look at while they are defined
is enough. Nothing of it stays in ``sys.modules``; a process that has torch already uses it.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any


@contextmanager
def config() -> Iterator[Any]:
    """``slime_ext.config``, quickly; what it gives may be used inside the ``with`` block alone."""
    if "torch" in sys.modules:
        yield importlib.import_module("slime_ext.config")
        return
    before = set(sys.modules)
    sys.modules["torch"] = _stand_in()
    try:
        yield importlib.import_module("slime_ext.config")
    finally:
        for name in set(sys.modules) - before:
            if name == "torch" or name.startswith("slime_ext."):
                del sys.modules[name]
                sys.modules["slime_ext"].__dict__.pop(name.removeprefix("slime_ext."), None)


def _stand_in() -> ModuleType:
    """What the configuration rooms look at while they are defined; nothing of it computes."""
    torch = _StandIn("torch")
    torch.Tensor, torch.device, torch.dtype, torch.inf = object, object, object, math.inf
    torch.no_grad = lambda: lambda function: function
    torch.autograd = SimpleNamespace(Function=object)
    torch.library = SimpleNamespace(Library=_Library, register_fake=_nothing)
    return torch


class _StandIn(ModuleType):
    """A module that has every name, such as torch.int64 in a signature."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return object()


class _Library:
    """Operations that are announced, never called."""

    def __init__(self, *names: str) -> None:
        self.define = self.impl = _nothing


def _nothing(*args: Any, **kwargs: Any) -> None: ...
