"""Processes of a run start by a fork of one that has imported torch, Ray, SGLang and the host already.

Every Ray worker and every child of SGLang imports the same packages, 9 s of CPU each. Here one process
imports them, and forks once per worker: in a new interpreter `sitecustomize` calls `hand_over` before
anything else, which sends command line, environment and open files to the server, whose fork goes on as that
process. The new interpreter stays as its shell: it passes signals on and ends as it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from slime_ext.tools.without_cuda.stand_ins import sglang_kernels

VARIABLE = "SLIME_EXT_FORK_SERVER"
SCRIPTS = ("setup_worker.py", "default_worker.py")  # of Ray
CODE = "from multiprocessing.spawn import spawn_main"
MOST_FILES = 250  # of one message between two processes
_HEADER = struct.Struct("!I")
_HIGH = 512  # above the numbers of files that a fresh interpreter has open


# --- in a new interpreter ---


def hand_over() -> None:
    """Lets the server's fork do this interpreter's work; returns only where there is nothing to hand over."""
    address, words = os.environ.get(VARIABLE), sys.orig_argv
    program = program_of(words)
    if not address or program is None:
        return
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
    except OSError:  # the server has ended; this process imports by itself
        connection.close()
        return
    request = {
        "program": program,
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "path": sys.path,
    }
    files = [n for n in _open_files() if n != connection.fileno()]
    body = json.dumps(request | {"files": files}).encode()
    socket.send_fds(connection, [_HEADER.pack(len(body))], files)
    connection.sendall(body)
    for number in files:  # or a pipe would stay open after the fork has closed it
        if number > 2:
            os.close(number)
    _shell(connection)


def program_of(words: Sequence[str]) -> list[str] | None:
    """["-c", code, ...] or [script, ...] of a command line that the server takes, else None."""
    for place, word in enumerate(words[1:], 1):
        if word == "-c":
            return list(words[place:]) if words[place + 1].startswith(CODE) else None
        if not word.startswith("-"):
            return list(words[place:]) if Path(word).name in SCRIPTS else None
    return None


def _open_files() -> list[int]:
    numbers = []
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 (before pathlib has listed and closed)
        with contextlib.suppress(OSError):  # the listing's own
            fcntl.fcntl(int(entry), fcntl.F_GETFD)
            numbers.append(int(entry))
    return sorted(numbers)[:MOST_FILES]


def _shell(connection: socket.socket) -> None:
    """Passes signals to the fork and ends with its status."""
    pid = _HEADER.unpack(connection.recv(_HEADER.size, socket.MSG_WAITALL))[0]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    answer = connection.recv(_HEADER.size, socket.MSG_WAITALL)
    status = _HEADER.unpack(answer)[0] if len(answer) == _HEADER.size else 1 << 8
    if os.WIFSIGNALED(status):
        with contextlib.suppress(OSError):  # nobody handles SIGKILL
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


# --- in the server ---


def start(address: str) -> int | None:
    """Forks a server that listens at `address`: None in the caller, an exit status in the server's forks.

    A caller that gets a status must end with it. Where this process has more threads than one, which a fork
    would lose, no server is started. The server ends with the run, as every process that carries its mark.
    """
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        return None
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    os.environ[VARIABLE] = address
    if os.fork():
        listener.close()
        return None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return _keep(connection)
        connection.close()


def _keep(connection: socket.socket) -> int:
    """Forks once more for an interpreter, and tells each of the two how the other ends.

    Returns in that fork alone, with the exit status of its program.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        header, files, _, _ = socket.recv_fds(connection, _HEADER.size, MOST_FILES)
        request = json.loads(connection.recv(_HEADER.unpack(header)[0], socket.MSG_WAITALL))
    except (OSError, ValueError, struct.error):
        os._exit(1)
    pid = os.fork()
    if pid == 0:
        connection.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return _run(request, files)
    for number in files:
        os.close(number)
    with contextlib.suppress(OSError):  # killed meanwhile
        connection.sendall(_HEADER.pack(pid))
    ended = os.pidfd_open(pid)
    if ended not in select.select([connection, ended], [], [])[0]:  # the interpreter never speaks: killed
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        connection.sendall(_HEADER.pack(status))
    os._exit(0)


def _run(request: dict, files: list[int]) -> int:
    """Runs a program in this fork, as the interpreter that asked for it would have; its exit status."""
    import numpy as np

    _renumber(files, request["files"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[:] = request["path"]
    program = request["program"]
    np.random.seed()  # Python draws a new seed after a fork; numpy does not
    try:
        if program[0] == "-c":
            sys.argv = ["-c", *program[2:]]
            sglang_kernels.fork_where_it_spawns()
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(program[1], "<string>", "exec"), main.__dict__)
        else:
            sys.argv = program
            sys.path.insert(0, str(Path(program[0]).parent))
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _renumber(files: list[int], numbers: list[int]) -> None:
    """Gives the received files the numbers that they had, inheritable as they were for the interpreter."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _HIGH) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(high, numbers, strict=True):
        os.dup2(file, number, inheritable=True)
        os.close(file)
