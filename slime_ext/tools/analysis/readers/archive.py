"""Reads archives of straw (``.straw.json``), which slime and vime write for ``--save-debug-rollout-data``.

The file is an index. The samples lie in a pool of straw, in records of tagged JSON beside typed tensors
(slime/data/archive.py at b2d74b1, slime/data/codec.py at 5dcf67c; the same in vime under its name). Reading
needs the package straw-queue and does not change the pool. No class that an archive names is imported.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slime_ext.errors import DataError, cut
from slime_ext.tools.analysis.readers.spilled import BESIDE, CODECS, NotThere, pool_folder, quickly
from slime_ext.tools.analysis.values import SpilledTensor

FORMATS, VERSION = ("slime.straw-debug", "vime.straw-debug"), 1
EXPORT = "or export the dump with RolloutArchive.export_pt"
OF_ONE = ("spec-info", "prefix-cache-info", "dynamic-filter", "ndarray", "status")  # tags with a single node
OPAQUE = ("bytes", "image-png", "record-set")  # tags of values that no analysis reads
ODD_FLOATS = ("inf", "-inf", "nan")


class _Sample(dict):
    """The fields of a sample by name."""


@dataclass(frozen=True)
class _Link:
    """A link to a value in another record, with the changes of each sample since then."""

    record: Any
    path: Sequence[Any] = ()
    changes: Sequence[Mapping[str, Any]] | None = None


def read_archive(path: Path) -> Mapping[str, Any]:
    """Returns the content of an archive, as ``torch.load`` would for a rollout dump. Tensors stay on disk.

    Raises:
        DataError: straw-queue is not installed, the pool is missing, or the file is no such archive. The
            message does not name the file.
    """
    try:
        straw = importlib.import_module("straw.store")
    except ImportError:
        raise DataError(
            f"expected straw-queue to read an archive of straw, got none: pip install straw-queue, {EXPORT}"
        ) from None
    try:
        index = json.loads(path.read_text("utf-8"))
        if index["format"] not in FORMATS or index["version"] != VERSION:
            raise DataError(f"expected version {VERSION} of an archive, got another version: {EXPORT[3:]}")
        pool = _Pool(straw, _folder(path, index["root"]), index["manifest"])
        with pool.store.read_session() as pool.reader:
            return {"rollout_id": index["rollout_id"], "samples": list(pool.samples())}
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}") from None
    except DataError:
        raise
    except NotThere:
        raise DataError(
            f"expected a whole pool of straw, got a damaged file in it: copy the pool again, {EXPORT}"
        ) from None
    except Exception as error:  # corrupt bytes can raise anything
        raise DataError(f"is cut off or no archive of straw ({cut(error or type(error).__name__)})") from None


def _folder(path: Path, root: str) -> Path:
    """Returns the folder of the pool: where it was written, or beside an archive that was moved."""
    folder = pool_folder(root, path)
    if folder is None:
        raise DataError(
            f"expected the pool of straw, got no such folder: copy it to {BESIDE} beside the file, {EXPORT}"
        )
    return folder


class _Pool:
    """Reads records of a pool.

    Args:
        straw: the module ``straw.store``.
        manifest: of the archive's root record, as in its index.
    """

    reader: Any

    def __init__(self, straw: Any, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.reference = importlib.import_module("straw.protocol").RecordSetRef.from_dict
        self.tensors = importlib.import_module("straw.tensor").TensorRef.from_record_set_many
        self.root, self.folder = self.reference(manifest), folder
        self.store = straw.SharedFilesystemStore(folder, self.root.manifest.segment.run_id, codecs=CODECS)

    def samples(self) -> Iterator[Mapping[str, Any]]:
        """Yields the samples in the order of the archive."""
        contents = self.value(self.root)
        chunks = {"raw": [*self.flat(contents["raw"])]} if "raw" in contents else {}
        for entry in contents["entries"]:
            chunk = entry.get("chunk", "raw")
            if chunk not in chunks:
                chunks = {chunk: [*self.flat(contents["chunks"][chunk])]}  # entries of a chunk are adjacent
            yield chunks[chunk][entry["offset"]]

    def flat(self, value: Any) -> Iterator[_Sample]:
        """Yields the samples in nested lists of samples and links."""
        if isinstance(value, _Sample):
            yield value
        elif isinstance(value, _Link):
            yield from self.followed(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from self.flat(item)

    def followed(self, link: _Link) -> Iterator[_Sample]:
        """Yields the samples that a link leads to."""
        value = self.value(link.record)
        for part in link.path:
            value = value[part]
        if link.changes is None:
            yield from self.flat(value)
            return
        for sample, changes in zip(self.flat(value), link.changes, strict=True):
            metadata = {**(sample.get("metadata") or {}), **changes.get("metadata", {})}
            yield _Sample({**sample, **changes, "metadata": metadata})

    def value(self, record: Any) -> Any:
        """Returns the value that a record holds."""
        (stored,) = quickly(lambda: [*self.reader.read(record)], self.folder, record.manifest.segment)
        content = json.loads(bytes(stored.payload))
        if stored.codec != "slime.v1" or content["version"] != VERSION:
            raise ValueError(f"codec {cut(stored.codec)}")
        links = [self.reference(link) for link in self.reader.manifest(record)["dependencies"]]
        return _Tree(self, links).read(content["tree"])


class _Tree:
    """Turns the nodes of one record into values.

    Args:
        links: the records that this record refers to, by number.
    """

    def __init__(self, pool: _Pool, links: Sequence[Any]) -> None:
        self.pool, self.links = pool, links
        self.tensors: dict[int, Mapping[int, Any]] = {}

    def read(self, node: Any) -> Any:
        """Returns the value of a node: a JSON value, or a list of a tag and its arguments."""
        if not isinstance(node, list):
            return node
        tag, *of_tag = node
        if tag in OPAQUE:
            return None
        if tag in OF_ONE:
            return self.read(of_tag[0])
        read = {"dict": self.mapping, "sample": self.sample, "list": self.items, "tuple": self.items}.get(tag)
        read = read or {"tensor": self.tensor, "rollout-ref": self.link, "float": _odd_float}.get(tag)
        if read is None:
            raise ValueError(f"tag {cut(tag)}")
        return read(*of_tag)

    def mapping(self, pairs: Any) -> dict[Any, Any]:
        return {self.read(key): self.read(value) for key, value in pairs}

    def sample(self, fields: Any) -> _Sample:
        return _Sample(self.read(fields))

    def items(self, nodes: list[Any]) -> list[Any]:
        """Returns the values of a list. Lists of numbers, which are most frequent, stay as they are."""
        return [self.read(node) for node in nodes] if list in set(map(type, nodes)) else nodes

    def link(self, _: str, link: int, about: Any) -> _Link:
        target = self.read(about)
        return _Link(self.links[link], target.get("path") or (), target.get("sample_metadata"))

    def tensor(self, place: Mapping[str, int], shape: Any, dtype: str, is_lazy: bool, *_: Any) -> Any:
        """Returns a tensor of another record; a tensor that may be large is read only when it is used."""
        record, pool = place["dependency"], self.pool
        if record not in self.tensors:
            link = self.links[record]
            read = partial(pool.tensors, pool.store, link, reader=pool.reader)
            self.tensors[record] = quickly(read, pool.folder, link.manifest.segment)
        reference = self.tensors[record][place["ordinal"]]
        where = pool.folder, reference.record_ref.segment
        if is_lazy:
            return SpilledTensor(partial(quickly, reference.load, *where))
        return quickly(partial(reference.load, reader=pool.reader), *where)


def _odd_float(name: str) -> float:
    if name not in ODD_FLOATS:
        raise ValueError(f"float {cut(name)}")
    return float(name)
