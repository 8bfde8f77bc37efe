"""The processes of a run carry its mark; a guard ends them all when the run or its command has ended.

Run as a script this file is the guard: ``python processes.py MARK FOLDER``, with the standard library alone.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "SLIME_EXT_ENGINE"
SHARED = Path("/dev/shm")
LONGEST_S = 30.0


@contextlib.contextmanager
def guarded(mark: str, folder: Path) -> Iterator[None]:
    """Kills every process with the mark and removes the folder at the end, even if this process is killed.

    The guard runs in a session of its own and waits for the end of a pipe that only this process holds open.
    """
    quiet = subprocess.DEVNULL
    guard = subprocess.Popen(
        [sys.executable, "-I", __file__, mark, str(folder)],
        stdin=subprocess.PIPE,
        stdout=quiet,
        stderr=quiet,
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.communicate()


def marked_processes(mark: str) -> list[int]:
    """Ids of the living processes with `SLIME_EXT_ENGINE=<mark>` in their environment, of any session."""
    entry = f"{MARK}={mark}".encode()
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and entry in _environment(p)]


def _environment(process: Path) -> list[bytes]:
    with contextlib.suppress(OSError):  # gone meanwhile, or another user's
        return (process / "environ").read_bytes().split(b"\0")
    return []


def kill_marked(mark: str) -> None:
    """Kills every process with the mark until none is left, then removes their files in shared memory."""
    deadline, seen_none = time.monotonic() + LONGEST_S, 0
    while seen_none < 2 and time.monotonic() < deadline:  # in the middle of an exec a process shows no mark
        left = marked_processes(mark)
        seen_none = 0 if left else seen_none + 1
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for file in SHARED.glob(f"*_{glob.escape(mark)}*"):
        file.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.stdin.read()
    kill_marked(sys.argv[1])
    shutil.rmtree(sys.argv[2], ignore_errors=True)
