"""Asks the installed sglang-router whether it passes a field of a request on, without importing it."""

from __future__ import annotations

import functools
import importlib.util
import mmap
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def drops(field: str) -> str | None:
    """Returns the version of the installed router if it drops the field; None if not, or without a router.

    The hosts' own builds and the one of the package index have the same version. The compiled module of a
    router contains the names of the fields that it passes on.
    """
    try:
        release, spec = version("sglang-router"), importlib.util.find_spec("sglang_router")
        folders = spec.submodule_search_locations if spec else None
        modules = [file for folder in folders or () for file in Path(folder).glob("sglang_router_rs*.so")]
        states = [(module, module.stat().st_mtime_ns, module.stat().st_ino) for module in modules]
        is_kept = any(_contains(*state, field.encode()) for state in states)
    except (OSError, ValueError, PackageNotFoundError):
        return None
    return release if modules and not is_kept else None


@functools.cache
def _contains(file: Path, changed: int, inode: int, text: bytes) -> bool:
    """Searches a module of 90 MB, once per process because it takes 30 ms.

    Args:
        changed, inode: of the file, so that another one in its place is searched again.
    """
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text) >= 0
