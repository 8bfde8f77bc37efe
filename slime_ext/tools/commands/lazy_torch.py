"""Lets a command import our modules without waiting for torch, which loads at its first use."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any


class _NotYetLoaded(ModuleType):
    """A module that executes its file when something of it is used. Then it is an ordinary module.

    ``importlib.util.LazyLoader`` executes the file at the second ``import``, which reads ``__spec__``.
    """

    def __getattribute__(self, name: str) -> Any:
        if name != "__spec__" and type(self) is _NotYetLoaded:
            self.__class__ = ModuleType  # type: ignore[assignment]  # also while the file runs
            self.__spec__.loader.exec_module(self)  # type: ignore[union-attr]
        return ModuleType.__getattribute__(self, name)


def load_later() -> None:
    """Makes ``import torch`` cheap in this process, if it has not happened yet."""
    spec = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    if spec is not None:
        module = importlib.util.module_from_spec(spec)
        module.__class__ = _NotYetLoaded
        sys.modules["torch"] = module
