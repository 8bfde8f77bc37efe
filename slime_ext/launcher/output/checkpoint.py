"""Checkpoints that are whole or absent: written beside, synced, renamed, and only then named as the latest.

DIR/latest_checkpointed_iteration.txt (Megatron's name) holds the newest iteration; DIR/iter_0000012/ holds
layout.json and one rank_N.pt per rank.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slime_ext.errors import ConfigError, DataError

LATEST = "latest_checkpointed_iteration.txt"
LAYOUT = "layout.json"


def save(
    directory: str | Path,
    iteration: int,
    rank: int,
    payload: Mapping[str, Any],
    *,
    layout: Mapping[str, int],
    keep: int = 2,
    barrier: Callable[[], None] = lambda: None,
) -> Path:
    """Writes this rank's payload; when all ranks have, the checkpoint appears under its name at once.

    Every rank calls it with the same directory and iteration. A kill at any moment leaves the checkpoint
    before.

    Args:
        directory: where checkpoints are.
        iteration: what `load` will return; the caller's count.
        rank: global rank; rank 0 renames and prunes.
        payload: tensors and plain values; no classes of one's own.
        layout: the sizes that a run must share to load it, such as {"tensor": 2, "data": 1}.
        keep: newest checkpoints that stay; 0 keeps all.
        barrier: waits for all ranks; none is needed for one.

    Returns:
        The directory of this checkpoint.

    Raises:
        DataError: the disk refuses.
    """
    root = Path(directory)
    final, partial = root / _name(iteration), root / f".partial_{_name(iteration)}"
    try:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        barrier()
        _write_tensors(partial / f"rank_{rank}.pt", payload)
        barrier()
        if rank == 0:
            _publish(root, partial, final, iteration, layout)
            _prune(root, keep)
        barrier()
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"--save {root}: expected to write iteration {iteration}, got {_line(error)}"
        ) from error
    return final


def load(directory: str | Path, rank: int, *, layout: Mapping[str, int]) -> tuple[int, dict[str, Any]]:
    """The newest iteration and this rank's payload, tensors on the CPU.

    Raises:
        ConfigError: no checkpoint there, or one of another layout.
        DataError: a file that cannot be read.
    """
    import torch

    iteration = check(directory, layout)
    path = Path(directory) / _name(iteration) / f"rank_{rank}.pt"
    try:
        return iteration, torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DataError(f"{path}: expected a checkpoint of this rank, got {_line(error)}") from error


def layout_of(args: argparse.Namespace) -> dict[str, int]:
    """The sizes that a checkpoint depends on."""
    return {
        "tensor": args.tensor_model_parallel_size,
        "pipeline": args.pipeline_model_parallel_size,
        "context": args.context_parallel_size,
        "data": args.data_parallel_size,
    }


def latest(directory: str | Path) -> int | None:
    """The newest iteration, None where there is none."""
    path = Path(directory) / LATEST
    if not path.is_file():
        return None
    text = path.read_text().strip()
    if not text.isdecimal():
        raise DataError(f"{path}: expected an iteration number, got '{text[:40]}'")
    return int(text)


def check(directory: str | Path, layout: Mapping[str, int]) -> int:
    """The newest iteration, once it is known to be there and of this layout. Needs no torch.

    Raises:
        ConfigError: no checkpoint there, or one of another layout.
    """
    iteration = latest(directory)
    if iteration is None:
        raise ConfigError(f"--load {directory}: expected a directory with {LATEST}, got none")
    path = Path(directory) / _name(iteration) / LAYOUT
    if not path.is_file():
        raise ConfigError(f"--load {directory}: expected {_name(iteration)}/{LAYOUT}, got no such file")
    try:
        saved = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: expected JSON, got a damaged file") from error
    if saved != dict(layout):
        raise ConfigError(
            f"--load {directory}: expected the sizes {_sizes(layout)}, got a checkpoint of {_sizes(saved)}: "
            "load it with the sizes it was saved with"
        )
    for rank in range(math.prod(layout.values())):
        if not (path.parent / f"rank_{rank}.pt").is_file():
            raise ConfigError(f"--load {directory}: expected {_name(iteration)}/rank_{rank}.pt, got none")
    return iteration


def _name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def _sizes(layout: Mapping[str, int]) -> str:
    return " ".join(f"{name} {size}" for name, size in layout.items())


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _write_tensors(path: Path, payload: Mapping[str, Any]) -> None:
    import torch

    with path.open("wb") as file:
        torch.save(dict(payload), file)
        _sync(file)


def _publish(root: Path, partial: Path, final: Path, iteration: int, layout: Mapping[str, int]) -> None:
    _write_text(partial / LAYOUT, json.dumps(dict(layout)))
    _sync_directory(partial)
    aside = root / f".replaced_{final.name}"
    shutil.rmtree(aside, ignore_errors=True)
    if final.exists():  # the same iteration again
        final.rename(aside)
    partial.rename(final)
    shutil.rmtree(aside, ignore_errors=True)
    temporary = root / f".partial_{LATEST}"
    _write_text(temporary, str(iteration))
    temporary.replace(root / LATEST)
    _sync_directory(root)


def _write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        _sync(file)


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    """A rename is only safe against power loss once the directory itself is written."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _prune(root: Path, keep: int) -> None:
    saved = sorted(path for path in root.iterdir() if re.fullmatch(r"iter_\d{7,}", path.name))
    for path in saved[:-keep]:  # all stay for 0
        shutil.rmtree(path)
