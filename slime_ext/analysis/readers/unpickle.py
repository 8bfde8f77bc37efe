"""Files of torch.save read as data: nothing in one of them can name a function, so nothing in it runs."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch

from slime_ext.errors import DataError

FORBIDDEN = re.compile(r"GLOBAL ([\w.]+)|class ([\w.]+)|(numpy array of dtype \S+)")
CODES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1")
DTYPES = frozenset(numpy.dtype(code).str for code in CODES)


class _Named(Exception):
    """A pickle names something that is not a list, a mapping, a number or a text."""


class _Lists(pickle.Unpickler):
    """Unpickles lists, mappings, numbers and texts, and raises where a pickle names anything else.

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
    """Allows torch.load our stand-ins and nothing else, such as numpy's own functions that megatron
    allows."""
    others = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals(STAND_INS):
            yield
    finally:
        torch.serialization.add_safe_globals(others)


def _lists(path: Path) -> Any:
    """The content of a file without tensors; None if it has tensors, or is no such file."""
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


# numpy's own functions make whatever a pickle describes, objects and pointers among it. These stand-ins for
# them take the type of a number, a shape, and as many bytes as they need.


class DTypeName:
    """Stands in for numpy.dtype: keeps its name, such as <f8."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = self.str = code

    def __setstate__(self, state: Any) -> None:
        self.str = f"{state[1]}{self.code}"  # the byte order; what else is there makes other things of it


class Array(numpy.ndarray):
    """Stands in for numpy.ndarray and the function that makes one: empty until its content comes."""

    def __new__(cls, *_: Any) -> Array:
        return super().__new__(cls, 0)

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, content = state
        if dtype.str not in DTYPES:
            raise pickle.UnpicklingError(f"numpy array of dtype {dtype.str}")
        super().__setstate__((1, shape, numpy.dtype(dtype.str), bool(is_fortran), content))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return numpy.asarray(self).__reduce_ex__(protocol)  # it travels as what it stands for


class Number:
    """Stands in for the function that makes a number of numpy: makes one of Python."""

    def __new__(cls, dtype: DTypeName, content: bytes) -> Any:
        found = Array()
        found.__setstate__((1, (), dtype, False, content))
        return found.item()


class Empty:
    """Stands in for ``bytes``, which empty arrays call without arguments; bytes(n) would take n bytes of
    memory."""

    def __new__(cls) -> Any:
        return b""


def _called(name: str, stand_in: type) -> type:
    """A stand-in with the name that pickles use, by which torch finds it."""
    module, _, own = name.rpartition(".")
    return type(own, (stand_in,), {"__module__": module})


# As numpy 2 and numpy 1 name them.
STAND_INS = [
    _called("numpy.dtype", DTypeName),
    _called("numpy.ndarray", Array),
    *(_called(f"numpy.{core}.multiarray._reconstruct", Array) for core in ("_core", "core")),
    *(_called(f"numpy.{core}.multiarray.scalar", Number) for core in ("_core", "core")),
    _called("builtins.bytes", Empty),
]
