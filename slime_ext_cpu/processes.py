"""Ends all processes of a run when the run or its command ends.

Each process carries the run's mark in its environment, and a guard process kills whatever carries it. The
guard is this file, run as a script: ``python processes.py MARK FOLDER``.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "SLIME_EXT_ENGINE"
SHARED = Path("/dev/shm")
LONGEST_S, TIDYING_S = 30.0, 5.0
TIDIES = ("resource_tracker import main", "torch_shm_manager")  # in the command lines of those that tidy up


@contextlib.contextmanager
def guarded(mark: str, folder: Path) -> Iterator[None]:
    """Kills every process with the mark when the block ends, and removes the folder.

    The guard does so even if this process is killed. It runs in a separate session and waits until a pipe
    closes that only this process holds open.
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


def mark_semaphores() -> None:
    """Puts the run's mark into the names of this process's and its children's semaphores.

    multiprocessing's resource tracker normally removes them, but Ray may kill a worker together with its
    tracker. With the mark in the names, `kill_marked` can remove them.
    """
    if mark := os.environ.get(MARK):
        multiprocessing.current_process()._config["semprefix"] = f"/mp_{mark}"  # children copy the mapping


def show_environment() -> None:
    """Writes this process's variables to where Linux shows them to others, with the mark first.

    Linux shows the variables with which a program was started, so a fork shows those of its parent.
    Variables for which there is no room are left out.
    """
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    names = sorted(os.environ, key=lambda name: name != MARK)
    text = b"".join(os.fsencode(f"{name}={os.environ[name]}") + b"\0" for name in names)
    kept = text[: text.rfind(b"\0", 0, end - start) + 1]
    ctypes.memmove(start, kept.ljust(end - start, b"\0"), end - start)


def marked_processes(mark: str) -> dict[int, str]:
    """Returns {process id: command line} of living processes whose environment has the mark."""
    import psutil  # the extra `train` installs it

    processes = (process.info for process in psutil.process_iter(["pid", "cmdline", "environ"]))
    marked = (info for info in processes if (info["environ"] or {}).get(MARK) == mark)
    return {info["pid"]: " ".join(info["cmdline"] or ()) for info in marked}  # None while a process ends


def kill_marked(mark: str) -> None:
    """Kills every process with the mark. Then removes their files in shared memory.

    Processes that remove the semaphores and shared memory of others get five seconds to do so and end.
    """
    import psutil

    began, seen_none = time.monotonic(), 0
    while seen_none < 2 and (spent := time.monotonic() - began) < LONGEST_S:
        left = marked_processes(mark)
        seen_none = 0 if left else seen_none + 1  # look twice: during an exec a process shows no mark
        for pid, command in left.items():
            if spent > TIDYING_S or not any(name in command for name in TIDIES):
                with contextlib.suppress(psutil.Error):
                    psutil.Process(pid).kill()
        time.sleep(0.02)
    for file in SHARED.glob(f"*_{glob.escape(mark)}*"):
        file.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.stdin.read()
    kill_marked(sys.argv[1])
    shutil.rmtree(sys.argv[2], ignore_errors=True)
