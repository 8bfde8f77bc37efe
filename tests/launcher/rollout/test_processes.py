"""Ports, marks and the bond between parent and child."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time

import pytest

from slime_ext.launcher.rollout.processes import (
    MARK,
    hold_port,
    kill_marked,
    last_lines,
    marked_processes,
)

PARENT = """
import os, sys, time
from slime_ext.launcher.rollout.processes import spawn_bound
child = spawn_bound(["sleep", "60"], os.environ, open(os.devnull, "wb"))
time.sleep(60)
"""


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def listens(port: int) -> bool:
    """Whether a server takes connections there."""
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


IP_LOCAL_PORT_RANGE = 51  # linux/in.h, since Linux 6.3: (highest << 16) | lowest for this socket


def among(port: int) -> socket.socket:
    """A socket for which this is the only port to be had."""
    asking = socket.socket()
    asking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        asking.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("=I", port << 16 | port))
    except OSError:
        asking.close()
        pytest.skip("IP_LOCAL_PORT_RANGE: Linux 6.3 or later")
    return asking


def test_a_held_port_serves_those_who_name_it_alone():
    with hold_port() as held, socket.create_server(("127.0.0.1", 0)) as elsewhere:
        port = held.getsockname()[1]
        for ask in (
            lambda s: s.bind(("127.0.0.1", 0)),
            lambda s: s.connect(elsewhere.getsockname()),
        ):
            with among(port) as asking, pytest.raises(OSError):
                ask(asking)
        with socket.create_server(("127.0.0.1", port)) as server:
            socket.create_connection(server.getsockname()).close()


def test_a_port_that_is_held_no_more_is_given_away():
    with hold_port() as held:
        port = held.getsockname()[1]
    with among(port) as asking:
        asking.bind(("127.0.0.1", 0))


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


def test_last_lines_are_of_the_latest_start(tmp_path):
    log = tmp_path / "log"
    log.write_text("== start 1\nbefore\n== start 2\nfirst\n\nsecond\nthird\n")
    assert last_lines(log, "== start", count=2) == "second | third"
    assert last_lines(tmp_path / "absent", "== start") == "(no log)"
