"""Files of torch.save read as data: nothing in one of them can name a function, so nothing in it runs."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from slime_ext.analysis.readers.arrays import STAND_INS
from slime_ext.errors import DataError

FORBIDDEN = re.compile(r"GLOBAL ([\w.]+)|class ([\w.]+)|(numpy array of dtype \S+)")


class _Named(Exception):
    """A pickle names something that is not a list, a mapping, a number or a text."""


class _Lists(pickle.Unpickler):
    """Reads what consists of lists, mappings, numbers and texts alone; a name of anything else raises.

    torch.load(weights_only=True) reads the same, an opcode at a time in Python: a rollout dump of a million
    tokens takes it seconds.
    """

    def find_class(self, module: str, name: str) -> Any:
        raise _Named(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise _Named("a tensor")


def load_plain(path: Path) -> Mapping[str, Any]:
    """A torch file of plain data, its tensors on the CPU.

    Raises:
        DataError: it cannot be read, is cut off, or holds objects that are not data.
    """
    try:
        found = _lists(path)
        if found is None:
            with _stand_ins_alone():
                found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # corrupt bytes may lead anywhere
        raise DataError(f"{path}: {_why(error)}") from None
    if not isinstance(found, Mapping):
        raise DataError(f"{path}: expected a mapping, got {type(found).__name__}: not a dump of slime")
    return found


@contextmanager
def _stand_ins_alone() -> Iterator[None]:
    """What else this process lets pickles name, such as numpy's own functions for megatron, stands back."""
    others = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals(STAND_INS):
            yield
    finally:
        torch.serialization.add_safe_globals(others)


def _lists(path: Path) -> Any:
    """The content of a file without tensors; None if it has any, or is of another kind."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as stream:
                return _Lists(stream).load()
    except Exception:  # _Named, or corrupt bytes: torch.load says what it is
        return None


def _why(error: Exception) -> str:
    text = str(error) or type(error).__name__
    if found := FORBIDDEN.search(text):
        name = found[1] or found[2] or f"a {found[3]}"
        return f"holds {name}, which is no plain data: not loaded, since loading it could run code"
    if isinstance(error, (PermissionError, FileNotFoundError)):
        return f"cannot be read: {error.strerror}"
    return f"is cut off or no torch file ({text.splitlines()[0][:60]})"
