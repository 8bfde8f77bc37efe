"""Reads tensors that a dump only refers to, from safetensors or a pool of straw.

slime and vime keep large fields of a sample (routed experts, heads, supports) on disk. With
--rollout-routed-experts-store-dir, a dump holds a ``DiskTensorRef`` (slime/utils/tensor_store.py, later
slime/data/tensor.py) to a file of safetensors with one tensor, "tensor". With straw, it holds a ``TensorRef``
(straw/tensor.py of straw-queue 0.1.6) to a record of a pool. A tensor is read only when it is used, because
the experts of one rollout can take tens of gigabytes.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from slime_ext.tools.analysis.readers.unpickle import DATACLASSES, DiskTensor, Fields, PoolTensor
from slime_ext.tools.analysis.values import UNREADABLE, SpilledTensor

CODECS = ("bytes.v1", "json.v1", "slime.v1", "tensor.v1")  # slime/data/codec.py at 5dcf67c
DTYPES = {
    "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "F16": "float16",
    "BF16": "bfloat16", "F32": "float32", "F64": "float64", "BOOL": "bool",
}  # fmt: skip
BESIDE = "straw-data"  # the pool of a run whose transport is not straw
COPY_PARTS = 3  # last parts of the path of a copy beside the dump: <dump>_r3_spill/<a number>/<file>


ELSEWHERE = frozenset((SpilledTensor, Fields, *DATACLASSES.values()))  # types of tensors on disk


class NotThere(Exception):
    """A tensor cannot be read; the message says why."""


def with_tensors(
    sample: Mapping[str, Any], dump: Path, failed: Callable[[str, str], None]
) -> Mapping[str, Any]:
    """Returns a sample whose tensors on disk can be loaded, without those that are missing.

    Args:
        dump: the file that holds the sample.
        failed: is called with the name of a field and the reason why it is left out.
    """
    if ELSEWHERE.isdisjoint(map(type, sample.values())):
        return sample
    named = {key: v for key, v in sample.items() if isinstance(v, (Fields, SpilledTensor))}
    return dict(sample) | {key: opened(v, dump, partial(failed, key)) for key, v in named.items()}


def opened(value: Any, dump: Path, failed: Callable[[str], None]) -> SpilledTensor | None:
    """Returns a tensor that a dump refers to; None if it is missing, or if the value is no reference."""
    try:
        if isinstance(value, SpilledTensor):
            return SpilledTensor(value.read, failed)
        if isinstance(value, DiskTensor):
            return SpilledTensor(_in_file(value.fields(), dump), failed)
        if isinstance(value, PoolTensor):
            return SpilledTensor(_in_pool(value.fields(), dump), failed)
    except NotThere as error:
        failed(str(error))
    except Exception:  # corrupt bytes, or fields of another kind, can raise anything
        failed(UNREADABLE)
    return None


def _in_file(about: Mapping[str, Any], dump: Path) -> Callable[[], Tensor]:
    """Returns a reader of a ``DiskTensorRef``: where it was written, or beside a dump that was moved.

    Raises:
        NotThere: the file is missing, or it holds another tensor.
    """
    written = Path(about["path"])
    moved = dump.parent.joinpath(*written.parts[-COPY_PARTS:])
    path = next((p for p in (written, moved) if p.is_file()), None)
    if path is None:
        raise NotThere("its file is missing")
    safetensors = _package("safetensors", "safetensors")
    with safetensors.safe_open(path, framework="pt") as file:  # reads only the header
        there = file.get_slice("tensor")
        shape, dtype = tuple(there.get_shape()), DTYPES.get(there.get_dtype())
    if shape != tuple(about["shape"]) or dtype != about["dtype"]:
        raise NotThere("its file holds another tensor")

    def read() -> Tensor:
        with safetensors.safe_open(path, framework="pt") as file:
            return file.get_tensor("tensor")

    return read


def _in_pool(about: Mapping[str, Any], dump: Path) -> Callable[[], Tensor]:
    """Returns a reader of a ``TensorRef`` of straw.

    Raises:
        NotThere: straw is not installed, or the pool is missing.
    """
    tensor, protocol = _package("straw.tensor", "straw-queue"), _package("straw.protocol", "straw-queue")
    folder = pool_folder(about["root"], dump)
    if folder is None:
        raise NotThere("its pool of straw is missing")
    known = {key: about[key] for key in ("shape", "dtype", "nbytes", "run_id")}
    record = protocol.RecordRef.from_dict(about["record_ref"])
    reference = tensor.TensorRef(path="", record_ref=record, root=str(folder), codecs=CODECS, **known)
    quickly(reference.validate, folder, record.segment)
    return partial(quickly, reference.load, folder, record.segment)


def pool_folder(root: str, dump: Path) -> Path | None:
    """Returns the folder of a pool of straw; None if there is none.

    It is where it was written, or beside a dump that was moved, or beside the folder of the dump.
    """
    written = Path(root)
    places = (
        folder / name for folder in (dump.parent, dump.parent.parent) for name in (BESIDE, written.name)
    )
    return next((place for place in (written, *places) if place.name and place.is_dir()), None)


def quickly(read: Callable[[], Any], folder: Path, segment: Any) -> Any:
    """Calls a reader of straw, and fails at once where a file of the pool is known to be damaged.

    straw waits four seconds for a file to become whole, and writes a line on stderr for each attempt. That
    happens once for each damaged file, without the lines.

    Args:
        segment: the file of the pool that the reader needs, as straw refers to it.

    Raises:
        NotThere: the file is missing, cut off, or known to be damaged.
    """
    file = folder / segment.path
    try:
        state = file.stat()
    except OSError:
        raise NotThere(UNREADABLE) from None
    key = (file, state.st_size, state.st_mtime_ns)
    if state.st_size < segment.offset + segment.size or key in DAMAGED:
        raise NotThere(UNREADABLE)
    with _without_stderr():
        try:
            return read()
        except Exception:
            DAMAGED.add(key)
            raise


DAMAGED: set[tuple[Path, int, int]] = set()  # files of pools, with their sizes and times


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Discards what native code writes on stderr."""
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def _package(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise NotThere(f"its reader {name} is not installed: pip install {name}") from None
