"""Ports that are held, and the end of a log."""

from __future__ import annotations

import socket
import struct

import pytest

from slime_ext.launcher.rollout.processes import hold_port, last_lines
from tests.without_cuda.test_processes import wait_for  # noqa: F401


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


def test_last_lines_are_of_the_latest_start(tmp_path):
    log = tmp_path / "log"
    log.write_text("== start 1\nbefore\n== start 2\nfirst\n\nsecond\nthird\n")
    assert last_lines(log, "== start", count=2) == "second | third"
    assert last_lines(tmp_path / "absent", "== start") == "(no log)"
