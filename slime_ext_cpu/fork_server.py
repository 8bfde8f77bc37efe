"""Forks a run's processes from one that has already imported torch, SGLang and Megatron-LM.

Every Ray worker and every child of SGLang imports the same packages, which takes 9 s of CPU each time. Here
one process imports them: Python's own fork server (`preloaded.py`). When Ray starts an interpreter for a
worker, that interpreter asks the server for a fork before it imports anything (`site/sitecustomize.py`). It
stays alive as a proxy: it forwards signals to the fork and exits with the fork's status. Children that
multiprocessing starts need no proxy, because multiprocessing asks the server itself.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing import connection, forkserver, reduction, resource_tracker, spawn
from pathlib import Path
from typing import Any, NoReturn

VARIABLE = "SLIME_EXT_FORK_SERVER"  # names the address at which the run's server listens
TRACKER = "SLIME_EXT_RESOURCE_TRACKER"  # names the file into which the run's processes report what they share
SCRIPTS = ("setup_worker.py", "default_worker.py", "log_monitor.py")  # the last prints what workers print
PRELOADED = "slime_ext_cpu.preloaded"
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)


def start(preload: str = PRELOADED) -> None:
    """Starts a server for this process and its descendants. The server ends with this process.

    If the environment names a server that listens, it serves this run too. Tests start one for several runs.
    """
    if Path(address := os.environ.get(VARIABLE, "")).is_socket():
        ask(address)
    else:
        forkserver.set_forkserver_preload([preload])
        send_environment()
        forkserver.ensure_running()
        os.environ[VARIABLE] = forkserver._forkserver._forkserver_address
    os.environ[TRACKER] = f"/proc/{os.getpid()}/fd/{resource_tracker.getfd()}"


def join(address: str) -> None:
    """Makes this process ask the server at `address` for forks.

    It reports to the run's resource tracker. A tracker for each worker is one more interpreter.
    """
    resource_tracker._resource_tracker._fd = os.open(os.environ[TRACKER], os.O_WRONLY)
    ask(address)


def ask(address: str) -> None:
    """Makes multiprocessing ask the server at `address`, which another process started."""
    server = forkserver._forkserver
    server._forkserver_address = address
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    server.ensure_running = resource_tracker.ensure_running  # it runs already
    send_environment()


def write_to_log() -> None:
    """Lets this process write to the output of the process that started its run, which is the run's log."""
    starter = Path(os.environ[TRACKER]).parent  # its folder of open files
    for number in (1, 2):
        file = os.open(starter / str(number), os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)


def send_environment() -> None:
    """Gives each fork the environment of the process that asks for it.

    Without this, Python's server would give the fork the server's environment.
    """
    data_for = spawn.get_preparation_data
    spawn.get_preparation_data = lambda name: data_for(name) | {"environment": dict(os.environ)}


def hand_over() -> None:
    """Lets a fork do this interpreter's work if it runs one of `SCRIPTS`. Ends when the fork ends.

    Returns in any other process, and if no server listens.
    """
    address, program = os.environ.get(VARIABLE, ""), program_of(sys.orig_argv)
    if program and Path(address).is_socket():
        join(address)
        run(_run_script, program, _Output())


def program_of(words: Sequence[str]) -> list[str]:
    """Returns [script, argument, ...] if the command line runs one of `SCRIPTS`, otherwise []."""
    at = next((i for i, word in enumerate(words) if i and not word.startswith("-")), 0)
    return list(words[at:]) if at and Path(words[at]).name in SCRIPTS else []


def run(target: Callable[..., Any], *arguments: Any) -> NoReturn:
    """Runs a function in a fork and forwards signals to it. This process then ends as the fork ended."""
    process = multiprocessing.get_context("forkserver").Process(target=_run, args=(target, *arguments))
    process.start()
    for number in FORWARDED:
        signal.signal(number, lambda number, frame: os.kill(process.pid, number))
    process.join()
    if process.exitcode < 0:
        if -process.exitcode in FORWARDED:
            signal.signal(-process.exitcode, signal.SIG_DFL)
        os.kill(os.getpid(), -process.exitcode)
    os._exit(process.exitcode)


def _run(target: Callable[..., Any], *arguments: Any) -> None:
    """Calls the function in the fork. The fork exits if the process that asked for it is killed."""
    asked = multiprocessing.parent_process().sentinel
    threading.Thread(target=lambda: connection.wait([asked]) and os._exit(1), daemon=True).start()
    try:
        target(*arguments)
    except Exception as error:  # multiprocessing would print it without calling the process's sys.excepthook
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # an interpreter does this at its end; a fork of multiprocessing does not


class _Output:
    """Carries stdout and stderr from the pickling process to the unpickling process."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        sys.stdout.flush()
        return _take_output, (reduction.DupFd(1), reduction.DupFd(2))


def _take_output(*files: Any) -> None:
    for number, file in enumerate(files, 1):
        os.dup2(file.detach(), number)


def _run_script(program: list[str], output: None) -> None:
    sys.argv = program
    sys.path.insert(0, str(Path(program[0]).parent))
    runpy.run_path(program[0], run_name="__main__")
