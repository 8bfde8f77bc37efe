"""Starts processes that die with their parent, and ends all processes that carry the mark of a run."""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

MARK = "SLIME_EXT_ENGINE"
SHARED = Path("/dev/shm")

# PR_SET_PDEATHSIG survives exec, so a Python of a few milliseconds sets it and then becomes the program; a
# preexec_fn would do the same inside a fork of a threaded process, which may deadlock. The signal comes when
# the *thread* that started the child ends. The check afterwards closes the gap before the call.
_BIND_TO_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def spawn_bound(
    command: Sequence[str],
    env: Mapping[str, str],
    output: IO,
    errors: IO | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen:
    """Starts a program in a session of its own; the kernel kills it when the calling thread ends.

    Standard error goes to `errors`, by default where the output goes; `pass_fds` stay open in the program.
    """
    return subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _BIND_TO_PARENT, str(os.getpid()), *command],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors or subprocess.STDOUT,
        start_new_session=True,
        pass_fds=pass_fds,
    )


def marked_processes(mark: str) -> list[int]:
    """Ids of the living processes with `SLIME_EXT_ENGINE=<mark>` in their environment, of any session."""
    entry = f"{MARK}={mark}".encode()
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and entry in _environment(p)]


def _environment(process: Path) -> list[bytes]:
    with contextlib.suppress(OSError):  # gone meanwhile, or another user's
        return (process / "environ").read_bytes().split(b"\0")
    return []


def kill_marked(mark: str, timeout: float = 10.0) -> list[int]:
    """Kills every other process with the mark, again until none is left, and removes the shared memory that
    they held; returns those that would not go."""
    deadline, seen_none, left = time.monotonic() + timeout, 0, []
    files: set[Path] = set()
    while seen_none < 2 and time.monotonic() < deadline:  # in the middle of an exec a process shows no mark
        left = [pid for pid in marked_processes(mark) if pid != os.getpid()]
        seen_none = 0 if left else seen_none + 1
        files |= shared_memory_of(left)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for file in files | set(SHARED.glob(f"*_{glob.escape(mark)}*") if mark else ()):
        file.unlink(missing_ok=True)
    return left


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """SGLang's shared memory files that these processes hold open; a killed server leaves them."""
    files = [file for pid in pids for file in _open_files(pid)]
    return {file for file in files if file.match(f"{SHARED}/sglang_*")}


def _open_files(pid: int) -> list[Path]:
    with contextlib.suppress(OSError):
        return [link.readlink() for link in Path(f"/proc/{pid}/fd").iterdir()]
    return []
