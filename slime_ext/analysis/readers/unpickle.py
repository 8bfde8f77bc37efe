"""Files of torch.save read as data: nothing in one of them can name a function, so nothing in it runs, and
what one claims to hold is compared with its size before it is built."""

from __future__ import annotations

import io
import math
import pickle
import re
import resource
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
# What a file may take for each of its bytes: once unpacked, in memory, and in numbers of its lists; and
# beyond. A list of floats takes 3.6 bytes for each byte of its pickle, one of small integers 4.
MOST_CONTENT, MOST_MEMORY, MOST_NUMBERS = 4, 32, 4
SLACK, MEMORY_SLACK, NUMBERS_SLACK = 64 << 20, 256 << 20, 1 << 20
DEEP = 5  # file, samples, sample, list, and one more
NESTED = (list, tuple, Mapping, torch.Tensor, numpy.ndarray)
CHUNK = 1 << 20  # bytes that are unpickled at a time
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
        DataError: it cannot be read, is cut off, holds objects that are not data, or claims more than its
            size can hold.
    """
    try:
        size = path.stat().st_size
        _check_entries(path, size)
        with _bounded(MEMORY_SLACK + MOST_MEMORY * size):
            found = _loaded(path)
        _check_numbers(path, size, found)
    except DataError:
        raise
    except Exception as error:  # corrupt bytes may lead anywhere
        raise DataError(f"{path}: {_why(error)}") from None
    if not isinstance(found, Mapping):
        raise DataError(f"{path}: expected a mapping, got {type(found).__name__}: not a dump of slime")
    return found


def _loaded(path: Path) -> Any:
    found = _lists(path)
    if found is not None:
        return found
    with _stand_ins_alone():
        return torch.load(path, map_location="cpu", weights_only=True)


def _check_entries(path: Path, size: int) -> None:
    """torch.save does not compress: entries far larger than their file unfold to whatever somebody likes.

    Raises:
        DataError: their sizes say so.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            claimed = sum(entry.file_size for entry in archive.infolist())
    except zipfile.BadZipFile:
        return  # torch.load says what it is
    if claimed > SLACK + MOST_CONTENT * size:
        raise DataError(
            f"{path}: expected about the {size:,} bytes that it has, got {claimed:,} once unpacked: left out"
        )


def _check_numbers(path: Path, size: int, found: Any) -> None:
    """A list that stands in many places is in the file but once, and would be copied for each of them.

    Raises:
        DataError: lists and tensors have more numbers than a file of this size writes down.
    """
    most = NUMBERS_SLACK + MOST_NUMBERS * size
    if _count(found, DEEP, most) > most:
        raise DataError(
            f"{path}: expected at most {MOST_NUMBERS} numbers for each of its {size:,} bytes, got more: its "
            "lists share what they hold, left out"
        )


def _count(value: Any, depth: int, most: int) -> int:
    """Numbers in a value down to a depth; beyond ``most`` it counts no further."""
    if isinstance(value, (torch.Tensor, numpy.ndarray)):
        return math.prod(value.shape)
    if not isinstance(value, NESTED):
        return 1
    parts = value.values() if isinstance(value, Mapping) else value
    is_flat = isinstance(parts, (list, tuple)) and not isinstance(next(iter(parts), None), NESTED)
    if is_flat or not depth:
        return len(value)
    total = 0
    for part in parts:
        total += _count(part, depth - 1, most - total)
        if total > most:
            break
    return total


@contextmanager
def _bounded(memory: int) -> Iterator[None]:
    """Lets this process take this many bytes more and no more, where the system can hold it to that; a pickle
    may ask for any size in a few bytes."""
    try:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        least = min(bound for bound in (now + memory, *before) if bound != resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_AS, (least, before[1]))
    except (OSError, ValueError):  # no Linux
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


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
                return _Lists(io.BufferedReader(stream, CHUNK)).load()
    except Exception:  # _Named, or corrupt bytes: torch.load says what it is
        return None


def _why(error: Exception) -> str:
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return f"takes more than {MOST_MEMORY} times its size in memory ({type(error).__name__}): left out"
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
