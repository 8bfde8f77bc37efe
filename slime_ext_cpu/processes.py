"""The processes of a run carry its mark; a guard ends them all when the run or its command has ended.

Run as a script this file is the guard: ``python processes.py MARK FOLDER``.
"""

from __future__ import annotations

import contextlib
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
TIDIES = ("resource_tracker", "torch_shm_manager")  # in command lines


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


def mark_semaphores() -> None:
    """Puts the mark of the run into the names of semaphores that this process and its children make.

    multiprocessing's resource tracker removes them, but Ray may kill the tracker of a worker with the worker.
    """
    if mark := os.environ.get(MARK):
        multiprocessing.current_process()._config["semprefix"] = f"/mp_{mark}"  # children copy the mapping


def marked_processes(mark: str) -> dict[int, str]:
    """Id -> command line of the living processes with `SLIME_EXT_ENGINE=<mark>` in their environment."""
    import psutil  # of the extra `train`

    found = (process.info for process in psutil.process_iter(["pid", "cmdline", "environ"]))
    marked = (info for info in found if (info["environ"] or {}).get(MARK) == mark)
    return {info["pid"]: " ".join(info["cmdline"] or ()) for info in marked}  # none while a process ends


def kill_marked(mark: str) -> None:
    """Kills every process with the mark until none is left, then removes their files in shared memory.

    Those that remove semaphores and shared memory of others have five seconds to do so and end.
    """
    import psutil

    began, seen_none = time.monotonic(), 0
    while seen_none < 2 and (spent := time.monotonic() - began) < LONGEST_S:
        left = marked_processes(mark)
        seen_none = 0 if left else seen_none + 1  # in the middle of an exec a process shows no mark
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
