"""Reads files of torch.save as data: a pickle that names a function or a class of its own choice is refused,
so nothing in a dump runs."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from slime_ext.errors import DataError

LOCAL_HEADER, LENGTHS_AT = 30, 26  # bytes of a zip entry's header, and where the lengths of its names are
CHUNK = 1 << 20  # bytes that are unpickled at a time
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
    "UntypedStorage": torch.uint8,  # the tensor names its dtype
}
Shape = Sequence[int]


class NotPlain(Exception):
    """A pickle names something that is not a list, a mapping, a number, a text, a tensor or an array."""


class PlainUnpickler(pickle.Unpickler):
    """Unpickles lists, mappings, numbers, texts, tensors and arrays of numbers; raises if the pickle names
    anything else.

    Names resolve to methods of this object, constants and our stand-ins for numpy's classes, so a pickle can
    change nothing that outlives it. torch.load(weights_only=True) does the same in Python, several times
    slower.
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
            "builtins.bytes": self.nothing,  # empty arrays call it
            "__builtin__.bytes": self.nothing,
            "numpy.dtype": self.dtype,
            "numpy.ndarray": "ndarray",
        }
        for core in ("numpy._core.multiarray", "numpy.core.multiarray"):  # as numpy 2 and numpy 1 name it
            self.names |= {f"{core}._reconstruct": self.array, f"{core}.scalar": self.number}

    def load(self) -> Any:
        try:
            return super().load()
        finally:  # breaks the cycles that would keep the content until the next garbage collection
            self.memo.clear()
            self.names.clear()

    def find_class(self, module: str, name: str) -> Any:
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
        return storage.as_strided(size, stride, offset)

    def tensor_of(self, storage: Tensor, offset: int, size: Shape, stride: Shape, *more: Any) -> Tensor:
        """A view of an untyped storage; its dtype is the third argument after the strides."""
        return storage.view(more[2]).as_strided(size, stride, offset)

    def parameter(self, data: Tensor, *_: Any) -> Tensor:
        return data

    def encoded(self, text: str, _: str) -> bytes:
        """Bytes, as protocol 2 writes them."""
        return text.encode("latin1")

    def nothing(self) -> bytes:
        return b""

    def dtype(self, code: Any, *_: Any) -> DTypeName:
        return DTypeName(code)

    def array(self, *_: Any) -> Array:
        """An empty array; BUILD fills it."""
        return Array(0)

    def number(self, dtype: DTypeName, content: bytes) -> Any:
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
        DataError: it cannot be read, is cut off, or holds objects that are not data; the message does not
            name the file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            found = PlainUnpickler(archive).load()
    except Exception as error:  # corrupt bytes may lead anywhere
        raise DataError(_why(error)) from None
    if not isinstance(found, Mapping):
        raise DataError(f"expected a mapping, got {type(found).__name__}: not a dump of slime")
    return found


def _why(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "does not fit into memory (MemoryError)"
    if isinstance(error, NotPlain):
        return f"holds {error}, which is no plain data: not loaded, since loading it could run code"
    if isinstance(error, (PermissionError, FileNotFoundError)):
        return f"cannot be read: {error.strerror}"
    text = str(error) or type(error).__name__
    return f"is cut off or no torch file ({text.splitlines()[0][:60]})"
