"""What a run needs of the machine, checked before it starts: each fault is one line, within a second."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from slime_ext.errors import ConfigError

TEMPORARY, SHARED = Path("/tmp"), Path("/dev/shm")  # Ray's sockets have 107 characters: no other TMPDIR
OBJECT_STORE_BYTES = 256 << 20  # of Ray: in /dev/shm, or in /tmp where that is smaller
ROOM = 64 << 20  # bytes: dumps, TensorBoard and checkpoint of a small run
FULL = 1 << 20
TEMPORARY_ROOM, SHARED_ROOM = 64 << 20, 8 << 20  # Ray's logs; SGLang's and torch's shared memory
# glibc keeps freed memory, as a caching device allocator does. Six layers of the language model, forwards and
# backwards: 1.2 s of CPU instead of 1.7, of which 0.5 were page faults, and 280 MB more.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_TOP_PAD_": str(1 << 28)}
DEVICES = "nvidia[0-9]*"


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
    """Bytes that this user may still write there."""
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return 0


def full_places(out: Path) -> list[Path]:
    """The places a run writes to that have less than a MiB left."""
    return [place for place in (out, TEMPORARY, SHARED) if _free(place) < FULL]


@contextlib.contextmanager
def room_or_one_line(out: Path) -> Iterator[None]:
    """Turns an error of a full disk into a ConfigError that names the place."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        place = error.filename or out
        raise ConfigError(
            f"{place}: expected room to write, got '{error.strerror}': make room there"
        ) from None


def notes() -> Iterator[str]:
    """Lines to print before a run: what it changes for itself on this machine."""
    devices = sorted(path.name for path in Path("/dev").glob(DEVICES))
    if devices:
        yield f"without CUDA: {', '.join(devices)} hidden from this run, which is on the CPU"
