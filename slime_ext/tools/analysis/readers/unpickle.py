"""Reads files of torch.save as data, so that no code in a dump can run.

A pickle that names any function or class outside a fixed list is refused.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from slime_ext.errors import DataError

# Names of storages in files of torch.save -> dtype.
STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool, "UntypedStorage": torch.uint8,
}  # fmt: skip
# Dtypes that numpy has, too.
ARRAYS = {t: torch.empty(0, dtype=t).numpy().dtype for t in {*STORAGES.values()} - {torch.bfloat16}}
OF_SECOND_FORM = (
    2  # arguments of _rebuild_tensor_v2 after the stride; in _rebuild_tensor_v3 the dtype follows
)
ZIP = b"PK"  # the first bytes of a file of torch.save
DTYPES = frozenset(f"<{kind}{size}" for kind in "fiu" for size in (2, 4, 8)) | {"|i1", "|u1", "|b1"}


class NotPlain(Exception):
    """A pickle holds something that is not a list, mapping, number, text, tensor or array."""


class NotRegular(Exception):
    """A path is no regular file."""


class DTypeName:
    """Replaces numpy.dtype, which would build whatever a pickle describes. Keeps only a name such as <f8."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = self.str = code

    def __setstate__(self, state: Any) -> None:
        self.str = (
            f"{state[1]}{self.code}"  # the byte order; the rest of the state describes other kinds of dtypes
        )


class Array(numpy.ndarray):
    """Replaces numpy.ndarray. Accepts only a dtype of numbers, a shape, and the bytes that they need."""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, content = state
        if dtype.str not in DTYPES:
            raise NotPlain(f"a numpy array of dtype {dtype.str}")
        super().__setstate__((1, shape, numpy.dtype(dtype.str), bool(is_fortran), content))


class Fields:
    """Replaces a dataclass of a host, and keeps the fields that a pickle gives it.

    ``__setstate__`` prevents a pickle from setting attributes of the class.
    """

    __slots__ = ("state",)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def fields(self) -> dict[str, Any]:
        """Returns the fields by name, including those of nested dataclasses.

        Raises:
            AttributeError, TypeError: the pickle gave it something other than fields.
        """
        return {k: v.fields() if isinstance(v, Fields) else v for k, v in dict(self.state).items()}


class DiskTensor(Fields):
    """Replaces slime's ``DiskTensorRef``."""

    __slots__ = ()


class PoolTensor(Fields):
    """Replaces straw's ``TensorRef``."""

    __slots__ = ()


# Dataclasses in dumps -> their replacements. Those of miles occur in samples of several LoRA adapters.
DATACLASSES: dict[str, type[Fields]] = {
    "miles.utils.types.AdapterRef": Fields,
    "miles.utils.types.RewardSpec": Fields,
    "straw.protocol.RecordRef": Fields,
    "straw.protocol.RecordSetRef": Fields,
    "straw.protocol.SegmentRef": Fields,
    "straw.tensor.TensorRef": PoolTensor,
    **{
        f"{host}.{module}.DiskTensorRef": DiskTensor
        for host in ("slime", "vime")
        for module in ("utils.tensor_store", "data.tensor")
    },
}


def _number(dtype: DTypeName, content: bytes) -> Any:
    array = Array(0)
    array.__setstate__((1, (), dtype, False, content))
    return array.item()


def _tensor(storage: Any, offset: int, size: Sequence[int], stride: Sequence[int], *more: Any) -> Any:
    """Returns a tensor of torch.save, as an array if its storage is one.

    In the third form, the storage holds bytes, and ``more`` the dtype.
    """
    if isinstance(storage, numpy.ndarray):
        if len(more) <= OF_SECOND_FORM and len(size) == 1 and stride[0] == 1 and offset >= 0:
            (count,) = size
            if 0 <= count <= len(storage) - offset:
                return storage if count == len(storage) else storage[offset : offset + count]
        view = _tensor(torch.from_numpy(storage), offset, size, stride, *more)
        return view.numpy() if view.dtype in ARRAYS else view
    if len(more) > OF_SECOND_FORM and more[OF_SECOND_FORM] != storage.dtype:
        storage = storage.view(more[OF_SECOND_FORM])
    return storage.as_strided(size, stride, offset)  # raises if it leaves the storage


def _copy_of(function: Callable) -> Callable:
    """Returns a copy of a function, because a pickle can set attributes on it."""
    return lambda *arguments: function(*arguments)


def _names() -> dict[str, Any]:
    """Returns the objects for the names in a pickle, new ones for each file."""
    rebuilds = ("_rebuild_tensor_v2", "_rebuild_tensor_v3")
    objects: dict[str, Any] = {f"torch._utils.{name}": _copy_of(_tensor) for name in rebuilds}
    objects["torch._utils._rebuild_parameter"] = lambda tensor, *_: tensor
    for core in ("numpy._core.multiarray", "numpy.core.multiarray"):  # as numpy 2 and numpy 1 name it
        objects |= {f"{core}._reconstruct": lambda *_: Array(0), f"{core}.scalar": _copy_of(_number)}
    return (
        objects
        | DATACLASSES
        | {
            "collections.OrderedDict": dict,
            "torch.Size": tuple,
            "torch.storage.UntypedStorage": torch.uint8,
            "_codecs.encode": lambda text, _: text.encode("latin1"),  # bytes, as protocol 2 writes them
            "builtins.bytes": lambda: b"",  # empty arrays call it
            "__builtin__.bytes": lambda: b"",
            "numpy.dtype": _copy_of(DTypeName),
            "numpy.ndarray": "ndarray",
        }
    )


class PlainUnpickler(pickle.Unpickler):
    """Unpickles lists, mappings, numbers, texts, tensors and arrays of numbers, and nothing else.

    It raises if the pickle names another object. torch.load(weights_only=True) does the same in Python, but
    is ten times slower on lists.

    Args:
        storage: returns the tensor of a storage, from its key, dtype and number of elements.
    """

    def __init__(self, file: Any, storage: Callable[[str, torch.dtype, int], Any] | None = None) -> None:
        # A file with peek() makes lists three times as fast to read.
        super().__init__(io.BufferedReader(file), encoding="utf-8")
        self.names, self.storage = _names(), storage
        self.storages: dict[str, Any] = {}  # tensors can share a storage

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if f"{module}.{name}" not in self.names:
            raise NotPlain(f"{module}.{name}")
        return self.names[f"{module}.{name}"]

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, _, count = pid
        if kind != "storage" or self.storage is None or not isinstance(dtype, torch.dtype):
            raise NotPlain(f"a reference to a {type(kind).__name__}")
        if key not in self.storages:
            self.storages[key] = self.storage(key, dtype, count)
        return self.storages[key]


def load_plain(path: Path, *, tensors: bool = False) -> Mapping[str, Any]:
    """Returns the content of a torch file of plain data, with tensors on the CPU, or as arrays.

    Args:
        tensors: whether tensors stay tensors. Small ones are slower than arrays. bfloat16 has no array.

    Raises:
        DataError: it cannot be read, is cut off, or holds objects that are not data. The message does not
            name the file.
    """
    try:
        content = _read(path, tensors)
    except Exception as error:  # corrupt bytes can raise anything
        raise DataError(_why(error, path)) from None
    if not isinstance(content, Mapping):
        raise DataError(f"expected a mapping, got {type(content).__name__}: not a dump of slime")
    return content


def _read(path: Path, tensors: bool) -> Any:
    # On short tensors, torch.load spends nine tenths of its time in Python, around the two calls used here.
    if path.exists() and not path.is_file():
        raise NotRegular("expected a file, got a pipe or a device")  # which might wait without end
    path.open("rb").close()  # because the reader below gives no reason for a failure
    file = torch._C.PyTorchFileReader(str(path))
    if file.has_record("constants.pkl"):
        raise NotPlain("a TorchScript module")
    if file.has_record("byteorder") and file.get_record("byteorder").decode() != sys.byteorder:
        raise ValueError(f"expected numbers in {sys.byteorder}-endian order, got the other")

    def storage(key: str, dtype: torch.dtype, count: int) -> Any:
        if not tensors and dtype in ARRAYS:  # in a third of the time, and half of it for small tensors
            return numpy.frombuffer(bytearray(file.get_record(f"data/{key}")), ARRAYS[dtype], count)
        record = file.get_storage_from_record(f"data/{key}", count, dtype)  # needed only for its storage
        return torch.empty(0, dtype=dtype).set_(record.untyped_storage())

    # Read from the file, because get_record would hold this record in memory twice.
    with path.open("rb", buffering=0) as pickled:
        pickled.seek(file.get_record_offset("data.pkl"))
        return PlainUnpickler(pickled, storage).load()


def _why(error: Exception, path: Path) -> str:
    if isinstance(error, NotPlain):
        return f"holds {error}, which is no plain data: not loaded, because loading it could run code"
    if isinstance(error, (PermissionError, FileNotFoundError)):
        return f"cannot be read: {error.strerror}"
    if isinstance(error, (OSError, NotRegular)):
        return f"cannot be read: {error}"
    with path.open("rb") as file:
        begin = file.read(len(ZIP))
    if begin != ZIP:
        return "is no torch file: expected a .pt of slime, .straw.json or .jsonl: name the run's folder"
    return f"is cut off or no torch file ({type(error).__name__})"
