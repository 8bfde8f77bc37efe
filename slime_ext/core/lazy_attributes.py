"""Imports the attributes of a package on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime_ext.errors import did_you_mean


def lazy_attributes(
    package: str, files: Mapping[str, str], modules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Makes a package's ``__getattr__`` and ``__dir__``.

    Args:
        files: the name of an attribute -> the file of the package that defines it.
        modules: files of the package that are attributes themselves.
    """
    names = (*files, *modules)

    def __getattr__(name: str) -> Any:
        if name in files:
            return getattr(importlib.import_module(f"{package}.{files[name]}"), name)
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module '{package}' has no attribute '{name}'{did_you_mean(name, names)}")

    def __dir__() -> list[str]:
        return sorted(names)

    return __getattr__, __dir__
