"""The bond between parent and child, and the mark of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from slime_ext.tools.without_cuda.processes import MARK, kill_marked, marked_processes

PARENT = """
import os, sys, time
from slime_ext.tools.without_cuda.processes import spawn_bound
child = spawn_bound(["sleep", "60"], os.environ, open(os.devnull, "wb"))
time.sleep(60)
"""


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_the_child_dies_with_a_parent_that_is_killed():
    mark = f"test-{os.getpid()}-{time.monotonic_ns()}"
    parent = subprocess.Popen([sys.executable, "-c", PARENT], env={**os.environ, MARK: mark})
    names = lambda: sorted(open(f"/proc/{p}/comm").read().strip() for p in marked_processes(mark))  # noqa
    try:
        assert wait_for(lambda: "sleep" in names())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert wait_for(lambda: not marked_processes(mark))
    finally:
        kill_marked(mark)


def test_marked_processes_are_killed_in_any_session():
    mark = f"test-{os.getpid()}-{time.monotonic_ns()}"
    child = subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: mark}, start_new_session=True)
    assert wait_for(lambda: marked_processes(mark) == [child.pid])  # its environment shows once it runs
    assert kill_marked(mark) == [] and child.wait() == -signal.SIGKILL
