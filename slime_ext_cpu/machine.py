"""Checks before a run starts whether the machine has what it needs, within a second."""

from __future__ import annotations

import contextlib
import errno
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from slime_ext.errors import ConfigError

# Not TMPDIR, because the path of a Ray socket may have at most 107 characters.
TEMPORARY, SHARED = Path("/tmp"), Path("/dev/shm")
OBJECT_STORE_BYTES = 256 << 20  # Ray's; in /dev/shm, or in /tmp if /dev/shm is too small
ROOM = 64 << 20  # bytes of a small run's dumps, TensorBoard events and checkpoint
FULL = 1 << 20
TEMPORARY_ROOM, SHARED_ROOM = 64 << 20, 8 << 20  # Ray's logs; SGLang's and torch's shared memory
# Makes glibc keep freed memory, as a caching device allocator does. Forward and backward through six layers
# of the language model then take 1.2 s of CPU instead of 1.7 (0.5 were page faults), and 280 MB more memory.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_TOP_PAD_": str(1 << 28)}
DEVICES = "nvidia[0-9]*"
GFLOPS = 160.0  # `gflops` of two threads of the CPU on which the tasks' times were measured
PROBE_S = 0.3


def check_room(out: Path, room: int) -> None:
    """Raises ConfigError if a file system that the run writes to is too full."""
    shared = _free(SHARED)
    store = 0 if shared > OBJECT_STORE_BYTES + SHARED_ROOM else OBJECT_STORE_BYTES
    places = (
        (out, room, "the files of the run", "make room there, or name another folder with --out"),
        (TEMPORARY, TEMPORARY_ROOM + store, "Ray and temporary files", "make room there"),
        (SHARED, SHARED_ROOM, "shared memory", "make room there, or start the container with --shm-size 1g"),
    )
    for place, needed, what, todo in places:
        if (free := _free(place)) < needed:
            raise ConfigError(
                f"{place}: expected {needed >> 20} MiB free for {what}, got {free >> 20}: {todo}"
            )


def _free(place: Path) -> int:
    """Returns how many bytes this user may still write to a place."""
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return 0


def full_places(out: Path) -> list[Path]:
    """Returns the places of a run's files that have less than a MiB left."""
    return [place for place in (out, TEMPORARY, SHARED) if _free(place) < FULL]


@contextlib.contextmanager
def room_or_one_line(out: Path) -> Iterator[None]:
    """Turns the error of a full disk into a ConfigError that names the place."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        place = error.filename or out
        raise ConfigError(
            f"{place}: expected room to write, got '{error.strerror}': make room there"
        ) from None


def gflops(threads: int, in_float32: bool) -> float:
    """Measures for `PROBE_S` how fast this CPU multiplies, in float32 or bfloat16.

    The product is that of a layer of the language model with 640 tokens.

    Returns:
        10^9 multiplications and additions per second.
    """
    import torch

    tokens, inputs, outputs = 640, 576, 3072
    kind = torch.float32 if in_float32 else torch.bfloat16
    left, right = torch.ones(tokens, inputs, dtype=kind), torch.ones(inputs, outputs, dtype=kind)
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        left @ right  # the first product plans how to compute it
        products, began = 0, time.perf_counter()
        while (seconds := time.perf_counter() - began) < PROBE_S:
            left @ right
            products += 1
    finally:
        torch.set_num_threads(usual)
    return 2e-9 * tokens * inputs * outputs * products / seconds


def notes() -> Iterator[str]:
    """Yields lines to print before a run: how the run treats this machine's devices."""
    devices = sorted(path.name for path in Path("/dev").glob(DEVICES))
    if devices:
        yield f"without CUDA: this run uses the CPU and does not see {', '.join(devices)}"
