"""Files of torch.save read as data: nothing in one of them can name a function, so nothing in it runs, and
what one claims to hold is compared with its size before it is built."""

from __future__ import annotations

import io
import pickle
import resource
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from slime_ext.errors import DataError

# What a file may take for each of its bytes: once unpacked, in memory, and in numbers of its lists; and
# beyond. A list of floats takes 3.6 bytes for each byte of its pickle, one of small integers 4.
MOST_CONTENT, MOST_MEMORY, MOST_NUMBERS = 4, 32, 4
SLACK, MEMORY_SLACK, NUMBERS_SLACK = 64 << 20, 256 << 20, 1 << 20
DEEP = 5  # file, samples, sample, list, and one more
NESTED = (list, tuple, Mapping, torch.Tensor, numpy.ndarray)
PLAIN = frozenset((float, int, str, bool, bytes, type(None)))
LOCAL_HEADER, LENGTHS_AT = (
    30,
    26,
)  # of a zip entry: its size without name and extra field, whose lengths are at
CHUNK = 1 << 20  # bytes that are unpickled at a time
# Types of numbers as numpy and torch name them.
CODES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1")
DTYPES = frozenset(numpy.dtype(code).str for code in CODES)
STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,  # of the newest types, which the tensor names
}


Shape = Sequence[int]


class NotPlain(Exception):
    """A pickle names something that is not a list, a mapping, a number, a text, a tensor or an array."""


class PlainUnpickler(pickle.Unpickler):
    """Unpickles lists, mappings, numbers, texts, tensors and arrays of numbers from a file of torch.save, and
    raises where its pickle names anything else.

    What a name stands for are methods of this one object, values that cannot change and our stand-ins for
    arrays, so that what a pickle sets on them is gone with it. Faster than torch.load(weights_only=True),
    which reads an opcode at a time in Python.
    """

    def __init__(self, archive: zipfile.ZipFile) -> None:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        super().__init__(io.BufferedReader(archive.open(name), CHUNK))
        self.archive, self.folder = archive, name.removesuffix("data.pkl")
        self.storages: dict[str, Tensor] = {}
        self.names: dict[str, Any] = {
            "collections.OrderedDict": dict,
            "torch.Size": tuple,
            "torch._utils._rebuild_tensor_v2": self.tensor,
            "torch._utils._rebuild_tensor_v3": self.tensor_of,
            "torch._utils._rebuild_parameter": self.parameter,
            "torch.storage.UntypedStorage": "UntypedStorage",
            "_codecs.encode": self.encoded,
            "builtins.bytes": self.nothing,  # which empty arrays call; bytes(n) would take n bytes of memory
            "__builtin__.bytes": self.nothing,
            "numpy.dtype": self.dtype,
            "numpy.ndarray": "ndarray",
        }
        for core in ("numpy._core.multiarray", "numpy.core.multiarray"):  # as numpy 2 and numpy 1 name it
            self.names |= {f"{core}._reconstruct": self.array, f"{core}.scalar": self.number}

    def load(self) -> Any:
        """The content of the file."""
        try:
            return super().load()
        finally:  # both refer to this object, which would keep all content until the next garbage collection
            self.memo.clear()
            self.names.clear()

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name."""
        if module == "torch" and name in STORAGES:
            return name
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if f"{module}.{name}" not in self.names:
            raise NotPlain(f"{module}.{name}")
        return self.names[f"{module}.{name}"]

    def persistent_load(self, pid: Any) -> Tensor:
        """[N] the numbers of a storage."""
        _, kind, key, *_ = pid
        if key not in self.storages:
            content = _content(self.archive, self.archive.getinfo(f"{self.folder}data/{key}"))
            self.storages[key] = torch.frombuffer(content or bytearray(8), dtype=STORAGES[kind])
        return self.storages[key]

    def tensor(self, storage: Tensor, offset: int, size: Shape, stride: Shape, *_: Any) -> Tensor:
        """A view of a storage."""
        return storage.as_strided(size, stride, offset)

    def tensor_of(self, storage: Tensor, offset: int, size: Shape, stride: Shape, *more: Any) -> Tensor:
        """A view of an untyped storage, whose type of numbers comes third after the strides."""
        return storage.view(more[2]).as_strided(size, stride, offset)

    def parameter(self, data: Tensor, *_: Any) -> Tensor:
        """A parameter is its tensor."""
        return data

    def encoded(self, text: str, _: str) -> bytes:
        """How pickles of protocol 2 write bytes."""
        return text.encode("latin1")

    def nothing(self) -> bytes:
        """Bytes that there are none of."""
        return b""

    def dtype(self, code: Any, *_: Any) -> DTypeName:
        """A type of numbers by its name."""
        return DTypeName(code)

    def array(self, *_: Any) -> Array:
        """An array of numpy without its content, which comes next."""
        return Array(0)

    def number(self, dtype: DTypeName, content: bytes) -> Any:
        """A number of numpy as one of Python."""
        found = Array(0)
        found.__setstate__((1, (), dtype, False, content))
        return found.item()


def _content(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytearray:
    """The bytes of an entry. One that is not compressed, as torch.save writes them, is read at its place:
    ZipFile.read takes ten times as long for the few bytes of a short sample.

    Raises:
        BadZipFile: it is cut off, or its checksum is another.
    """
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
        return bytearray(archive.read(entry))
    file, content = archive.fp, bytearray(entry.file_size)
    file.seek(entry.header_offset + LENGTHS_AT)
    name, extra = struct.unpack("<HH", file.read(LOCAL_HEADER - LENGTHS_AT))
    file.seek(name + extra, io.SEEK_CUR)
    if file.readinto(content) != entry.file_size or zlib.crc32(content) != entry.CRC:
        raise zipfile.BadZipFile(f"Bad content of {entry.filename}")
    return content


class DTypeName:
    """Stands in for numpy.dtype, which makes whatever a pickle describes: keeps its name, such as <f8."""

    def __init__(self, code: Any) -> None:
        self.code = self.str = code

    def __setstate__(self, state: Any) -> None:
        self.str = f"{state[1]}{self.code}"  # the byte order; what else is there makes other things of it


class Array(numpy.ndarray):
    """Stands in for numpy.ndarray: takes the type of a number, a shape, and as many bytes as they need."""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, content = state
        if dtype.str not in DTYPES:
            raise NotPlain(f"a numpy array of dtype {dtype.str}")
        super().__setstate__((1, shape, numpy.dtype(dtype.str), bool(is_fortran), content))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return numpy.asarray(self).__reduce_ex__(protocol)  # it travels as what it stands for


def load_plain(path: Path) -> Mapping[str, Any]:
    """A torch file of plain data, its tensors on the CPU.

    Raises:
        DataError: it cannot be read, is cut off, holds objects that are not data, or claims more than its
            size can hold; says why, but not of which file.
    """
    try:
        size = path.stat().st_size
        with zipfile.ZipFile(path) as archive, _bounded(MEMORY_SLACK + MOST_MEMORY * size):
            _check_entries(size, archive)
            found = PlainUnpickler(archive).load()
        _check_numbers(size, found)
    except DataError:
        raise
    except Exception as error:  # corrupt bytes may lead anywhere
        raise DataError(_why(error)) from None
    if not isinstance(found, Mapping):
        raise DataError(f"expected a mapping, got {type(found).__name__}: not a dump of slime")
    return found


def _check_entries(size: int, archive: zipfile.ZipFile) -> None:
    """torch.save does not compress: entries far larger than their file unfold to whatever somebody likes.

    Raises:
        DataError: their sizes say so.
    """
    claimed = sum(entry.file_size for entry in archive.infolist())
    if claimed > SLACK + MOST_CONTENT * size:
        raise DataError(
            f"expected about the {size:,} bytes that it has, got {claimed:,} once unpacked: left out"
        )


def _check_numbers(size: int, found: Any) -> None:
    """A list that stands in many places is in the file but once, and would be copied for each of them.

    Raises:
        DataError: lists and tensors have more numbers than a file of this size writes down.
    """
    most = NUMBERS_SLACK + MOST_NUMBERS * size
    if _count(found, DEEP, most) > most:
        raise DataError(
            f"expected at most {MOST_NUMBERS} numbers for each of its {size:,} bytes, got more: its lists "
            "share what they hold, left out"
        )


def _count(value: Any, depth: int, most: int) -> int:
    """Numbers in a value down to a depth; beyond ``most`` it counts no further."""
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, numpy.ndarray):
        return value.size
    if not isinstance(value, NESTED):
        return 1
    parts = value.values() if isinstance(value, Mapping) else value
    is_flat = isinstance(parts, (list, tuple)) and not isinstance(next(iter(parts), None), NESTED)
    if is_flat or not depth:
        return len(value)
    total = 0
    for part in parts:
        total += 1 if type(part) in PLAIN else _count(part, depth - 1, most - total)
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


def _why(error: Exception) -> str:
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return f"takes more than {MOST_MEMORY} times its size in memory ({type(error).__name__}): left out"
    if isinstance(error, NotPlain):
        return f"holds {error}, which is no plain data: not loaded, since loading it could run code"
    if isinstance(error, (PermissionError, FileNotFoundError)):
        return f"cannot be read: {error.strerror}"
    text = str(error) or type(error).__name__
    return f"is cut off or no torch file ({text.splitlines()[0][:60]})"
