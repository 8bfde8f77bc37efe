"""Starts a fork server that several runs of a real host share, because each would import for 14 s."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from multiprocessing import resource_tracker
from pathlib import Path

import slime_ext
from slime_ext_cpu import driver, fork_server
from slime_ext_cpu.processes import MARK

ROOT = Path(slime_ext.__file__).parents[1]
START = """
import os, sys
from slime_ext_cpu import fork_server
fork_server.start()
print(os.environ[fork_server.VARIABLE], flush=True)
sys.stdin.read()  # until the tests end
"""
_kept: list[subprocess.Popen] = []  # a server ends when its pipe is closed
ROOM = 16384  # bytes for the variables of a run, in the place where Linux shows those of the server


@cache
def shared() -> dict[str, str]:
    """Returns the variables with which a run asks the server of these tests. It ends with this process."""
    driver._raise_open_files()
    env = _variables() | {"ROOM": "x" * ROOM}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([sys.executable, "-c", START], env=env, text=True, **pipes)
    _kept.append(server)
    return {fork_server.VARIABLE: server.stdout.readline().strip()}


def worker(code: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a script in a fork of the server, as Ray's workers run in forks of their run's own server.

    It names no run. So its fork, as those of an own server, takes what the server has installed as it is.
    """
    script = folder / "default_worker.py"
    script.write_text(code)
    tracker = f"/proc/{os.getpid()}/fd/{resource_tracker.getfd()}"
    env = _variables() | shared() | {fork_server.TRACKER: tracker, "TMPDIR": "/tmp"}
    command = [sys.executable, str(script), *words]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=300)


def _variables() -> dict[str, str]:
    """Returns the variables of a run that has no mark."""
    run = driver.HostRun(driver.WHEEL, ".", environment={"PYTHONPATH": str(ROOT)})
    env = run._variables(Path("/tmp"))
    del env[MARK]
    return env
