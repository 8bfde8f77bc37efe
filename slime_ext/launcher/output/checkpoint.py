"""Checkpoints that are whole or absent: written beside, synced, renamed; each file has its checksum.

DIR/iter_0000012/ holds sizes.json, one rank_N.pt per rank and rank_N.pt.sha256 in the format of `sha256sum`.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from slime_ext.errors import ConfigError, DataError

SIZES = "sizes.json"


def save(
    directory: str | Path,
    iteration: int,
    rank: int,
    payload: Mapping[str, Any],
    *,
    sizes: Mapping[str, Any],
    keep: int = 2,
    barrier: Callable[[], None] = lambda: None,
) -> Path:
    """Writes this rank's payload; when all ranks have, the checkpoint appears under its name at once.

    Every rank calls it with the same directory and iteration; a kill at any moment leaves the checkpoint
    before. Returns the directory of this checkpoint.

    Args:
        payload: tensors and plain values; no classes of one's own.
        sizes: what a run must share with the checkpoint to load it.
        keep: newest checkpoints that stay; 0 keeps all.
        barrier: waits for all ranks.

    Raises:
        DataError: the disk refuses.
    """
    root = Path(directory)
    final, partial = root / _name(iteration), root / f".partial_{_name(iteration)}"
    try:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            with _synced(partial / SIZES) as file:
                file.write(json.dumps(dict(sizes)).encode())
        barrier()
        _write_tensors(partial / f"rank_{rank}.pt", payload)
        barrier()
        if rank == 0:
            _sync_directory(partial)
            shutil.rmtree(final, ignore_errors=True)  # the same iteration again
            partial.rename(final)
            _sync_directory(root)
            _prune(root, iteration, keep)
        barrier()
    except (OSError, RuntimeError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise DataError(
            f"--save {root}: expected to write iteration {iteration}, got {_line(error)}"
        ) from error
    return final


def load(directory: str | Path, iteration: int, rank: int) -> dict[str, Any]:
    """This rank's payload, tensors on the CPU.

    Raises:
        DataError: a file that cannot be read.
    """
    import torch

    path = Path(directory) / _name(iteration) / f"rank_{rank}.pt"
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DataError(f"{path}: expected a checkpoint of this rank, got {_line(error)}") from error


def iterations(directory: str | Path) -> list[int]:
    """The iterations in a directory, sound or not, newest first."""
    names = (path.name for path in Path(directory).glob("iter_*"))
    return sorted((int(name[5:]) for name in names if re.fullmatch(r"iter_\d{7,}", name)), reverse=True)


def newest(directory: str | Path, sizes: Mapping[str, Any], ranks: int) -> tuple[int, list[str]]:
    """The newest iteration whose files are as they were written, and a line for each newer one. No torch.

    Raises:
        ConfigError: no checkpoint there, none that is sound, or one of other sizes.
    """
    damaged: list[str] = []
    for iteration in iterations(directory):
        path = Path(directory) / _name(iteration)
        try:
            saved = json.loads((path / SIZES).read_text())
            _check_same(directory, saved, sizes)
            for file in (path / f"rank_{rank}.pt" for rank in range(ranks)):
                if _sum(file) != Path(f"{file}.sha256").read_text().split()[0]:
                    raise ValueError(f"{file.name} is not what was written")
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            damaged.append(f"--load {directory}: {_name(iteration)} is damaged ({_line(error)})")
        else:
            return iteration, [f"{line}: going on from {_name(iteration)}" for line in damaged]
    if damaged:
        raise ConfigError(f"{damaged[0]}, and no other is sound: expected one whole checkpoint")
    raise ConfigError(f"--load {directory}: expected a directory with checkpoints (iter_N), got none")


def _check_same(directory: str | Path, saved: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    for name in sorted({*saved, *sizes}):
        if (was := saved.get(name)) != (now := sizes.get(name)):
            raise ConfigError(
                f"--load {directory}: expected {name.replace('_', ' ')} {was}, which it was saved with, "
                f"got {now}"
            )


def _sum(path: Path) -> str:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return hashlib.sha256(content).hexdigest()


def _name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def _line(error: BaseException) -> str:
    """Of the system's error, where torch put one of its own around it."""
    while error.__context__ is not None and not isinstance(error, OSError):
        error = error.__context__
    text = getattr(error, "strerror", None) or str(error)
    where = getattr(error, "filename", None)
    return (text.splitlines() or [type(error).__name__])[0] + (f": {Path(where).name}" if where else "")


def _write_tensors(path: Path, payload: Mapping[str, Any]) -> None:
    import torch

    with _synced(path) as file:
        torch.save(dict(payload), file)
    with _synced(Path(f"{path}.sha256")) as file:
        file.write(f"{_sum(path)}  {path.name}\n".encode())


@contextmanager
def _synced(path: Path) -> Iterator[IO[bytes]]:
    """A new file, which is on the disk when the block ends."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    """A rename is only safe against power loss once the directory itself is written."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _prune(root: Path, iteration: int, keep: int) -> None:
    """Newer ones are damaged: the run went on from before them."""
    saved = iterations(root)
    older = [i for i in saved if i <= iteration]
    for surplus in [i for i in saved if i > iteration] + (older[keep:] if keep else []):
        shutil.rmtree(root / _name(surplus))
