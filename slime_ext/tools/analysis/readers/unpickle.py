"""Reads files of torch.save as data: a pickle that names a function or a class of its own choice is refused,
so nothing in a dump runs."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from slime_ext.errors import DataError

# Of the storages that torch.save names -> dtype.
STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool, "UntypedStorage": torch.uint8,
}  # fmt: skip
OF_SECOND_FORM = 2  # arguments of _rebuild_tensor_v2 after the stride; _rebuild_tensor_v3 has the dtype next
DTYPES = frozenset(f"<{kind}{size}" for kind in "fiu" for size in (2, 4, 8)) | {"|i1", "|u1", "|b1"}


class NotPlain(Exception):
    """A pickle names something that is not a list, a mapping, a number, a text, a tensor or an array."""


class DTypeName:
    """Stands in for numpy.dtype, which makes whatever a pickle describes: keeps its name, such as <f8."""

    def __init__(self, code: Any, *_: Any) -> None:
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


class Fields:
    """Stands in for a dataclass of a host: keeps the fields that a pickle gives it. It has no other method,
    and ``__setstate__`` keeps a pickle from setting attributes of the class itself."""

    __slots__ = ("state",)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def fields(self) -> dict[str, Any]:
        """The fields by name, those of dataclasses inside them too.

        Raises:
            AttributeError, TypeError: a pickle gave it something else.
        """
        return {k: v.fields() if isinstance(v, Fields) else v for k, v in dict(self.state).items()}


class DiskTensor(Fields):
    """Stands in for slime's ``DiskTensorRef``."""

    __slots__ = ()


class PoolTensor(Fields):
    """Stands in for straw's ``TensorRef``."""

    __slots__ = ()


# Dataclasses in dumps -> what stands in for them. Those of miles are in samples of several LoRA adapters.
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
    found = Array(0)
    found.__setstate__((1, (), dtype, False, content))
    return found.item()


def _tensor(storage: Tensor, offset: int, size: Sequence[int], stride: Sequence[int], *more: Any) -> Tensor:
    """A tensor of torch.save; of the third form, whose storage is of bytes, with its dtype in ``more``."""
    if len(more) > OF_SECOND_FORM and more[OF_SECOND_FORM] != storage.dtype:
        storage = storage.view(more[OF_SECOND_FORM])
    return storage.as_strided(size, stride, offset)  # raises outside the storage


def _own(function: Callable) -> Callable:
    """A new function that does the same: a pickle can set attributes on what it names."""
    return lambda *given: function(*given)


def _names() -> dict[str, Any]:
    """What the names in a pickle stand for, made anew for each file."""
    rebuilds = ("_rebuild_tensor_v2", "_rebuild_tensor_v3")
    found: dict[str, Any] = {f"torch._utils.{name}": _own(_tensor) for name in rebuilds}
    found["torch._utils._rebuild_parameter"] = lambda tensor, *_: tensor
    for core in ("numpy._core.multiarray", "numpy.core.multiarray"):  # as numpy 2 and numpy 1 name it
        found |= {f"{core}._reconstruct": lambda *_: Array(0), f"{core}.scalar": _own(_number)}
    return (
        found
        | DATACLASSES
        | {
            "collections.OrderedDict": dict,
            "torch.Size": tuple,
            "torch.storage.UntypedStorage": torch.uint8,
            "_codecs.encode": lambda text, _: text.encode("latin1"),  # bytes, as protocol 2 writes them
            "builtins.bytes": lambda: b"",  # empty arrays call it
            "__builtin__.bytes": lambda: b"",
            "numpy.dtype": _own(DTypeName),
            "numpy.ndarray": "ndarray",
        }
    )


class PlainUnpickler(pickle.Unpickler):
    """Unpickles lists, mappings, numbers, texts, tensors and arrays of numbers; raises if the pickle names
    anything else. torch.load(weights_only=True) does so in Python, ten times slower on lists.

    Args:
        storage: key of a storage, its dtype and number of elements -> a tensor of them.
    """

    def __init__(self, file: Any, storage: Callable[[str, torch.dtype, int], Tensor] | None = None) -> None:
        # Of a file that can peek lists are read three times as fast.
        super().__init__(io.BufferedReader(file), encoding="utf-8")
        self.names, self.storage = _names(), storage
        self.storages: dict[str, Tensor] = {}  # tensors can share one

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if f"{module}.{name}" not in self.names:
            raise NotPlain(f"{module}.{name}")
        return self.names[f"{module}.{name}"]

    def persistent_load(self, pid: Any) -> Tensor:
        kind, dtype, key, _, count = pid
        if kind != "storage" or self.storage is None or not isinstance(dtype, torch.dtype):
            raise NotPlain(f"a reference to a {type(kind).__name__}")
        if key not in self.storages:
            self.storages[key] = self.storage(key, dtype, count)
        return self.storages[key]


def load_plain(path: Path) -> Mapping[str, Any]:
    """A torch file of plain data, its tensors on the CPU.

    Raises:
        DataError: it cannot be read, is cut off, or holds objects that are not data; the message does not
            name the file.
    """
    try:
        found = _read(path)
    except Exception as error:  # corrupt bytes may lead anywhere
        raise DataError(_why(error)) from None
    if not isinstance(found, Mapping):
        raise DataError(f"expected a mapping, got {type(found).__name__}: not a dump of slime")
    return found


def _read(path: Path) -> Any:
    # torch.load spends nine tenths of its time on short tensors in Python, around the two calls used here.
    path.open("rb").close()  # its reader gives no reason
    file = torch._C.PyTorchFileReader(str(path))
    if file.has_record("constants.pkl"):
        raise NotPlain("a TorchScript module")
    if file.has_record("byteorder") and file.get_record("byteorder").decode() != sys.byteorder:
        raise ValueError(f"expected numbers in {sys.byteorder}-endian order, got the other")

    def storage(key: str, dtype: torch.dtype, count: int) -> Tensor:
        record = file.get_storage_from_record(f"data/{key}", count, dtype)  # of no use but for its storage
        return torch.empty(0, dtype=dtype).set_(record.untyped_storage())

    return PlainUnpickler(io.BytesIO(file.get_record("data.pkl")), storage).load()


def _why(error: Exception) -> str:
    if isinstance(error, NotPlain):
        return f"holds {error}, which is no plain data: not loaded, since loading it could run code"
    if isinstance(error, (PermissionError, FileNotFoundError)):
        return f"cannot be read: {error.strerror}"
    text = str(error) or type(error).__name__
    return f"is cut off or no torch file ({text.splitlines()[0][:60]})"
