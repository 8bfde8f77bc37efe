"""The guard of a run, and the mark by which it finds what to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil

from slime_ext_cpu.processes import MARK, kill_marked, marked_processes

COMMAND = """
import os, pathlib, subprocess, sys, time
from slime_ext_cpu.processes import MARK, guarded
folder = pathlib.Path(sys.argv[2])
with guarded(sys.argv[1], folder):
    folder.mkdir()
    subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: sys.argv[1]}, start_new_session=True)
    time.sleep(60)
"""


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_a_command_that_is_killed_leaves_no_process_and_no_folder(tmp_path):
    mark, folder = f"test-{os.getpid()}-{time.monotonic_ns()}", tmp_path / "of a run"
    command = subprocess.Popen([sys.executable, "-c", COMMAND, mark, str(folder)])
    try:
        assert wait_for(lambda: marked_processes(mark)) and folder.exists()
        command.send_signal(signal.SIGKILL)
        command.wait()
        assert wait_for(lambda: not marked_processes(mark) and not folder.exists())
    finally:
        kill_marked(mark)


def test_marked_processes_are_killed_in_any_session():
    mark = f"test-{os.getpid()}-{time.monotonic_ns()}"
    child = subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: mark}, start_new_session=True)
    assert wait_for(lambda: list(marked_processes(mark)) == [child.pid])  # its environment shows once it runs
    kill_marked(mark)
    assert child.wait() == -signal.SIGKILL


SHOWS = f"""
import os, sys, time
from slime_ext_cpu.processes import show_environment
os.environ.clear()
os.environ.update({{"A": "1", "LONG": "x" * (1 << 17), "{MARK}": sys.argv[1]}})
show_environment()
time.sleep(60)
"""


def test_a_process_shows_the_mark_of_the_run_that_it_was_given():
    mark = f"test-{os.getpid()}-{time.monotonic_ns()}"
    child = subprocess.Popen([sys.executable, "-c", SHOWS, mark], env={**os.environ, MARK: "another"})
    try:
        assert wait_for(lambda: list(marked_processes(mark)) == [child.pid])
        assert set(psutil.Process(child.pid).environ()) == {MARK, "A"}  # there is no room for LONG
    finally:
        child.kill()
        child.wait()


def test_a_process_that_is_ending_has_no_command_line(monkeypatch):
    """The guard once ended of that, with four processes left."""
    ending = SimpleNamespace(info={"pid": 7, "cmdline": None, "environ": {MARK: "a"}})
    gone = SimpleNamespace(info={"pid": 8, "cmdline": None, "environ": None})
    monkeypatch.setattr(psutil, "process_iter", lambda attributes: [ending, gone])
    assert marked_processes("a") == {7: ""}
