"""Holds ports and reads logs of an engine; its processes are those of without_cuda/processes.py."""

from __future__ import annotations

import socket
from pathlib import Path

from slime_ext.without_cuda.processes import (  # noqa: F401
    MARK,
    kill_marked,
    marked_processes,
    shared_memory_of,
    spawn_bound,
)


def hold_port(host: str = "127.0.0.1") -> socket.socket:
    """Keeps a free TCP port of `host` for a server that will name it.

    Until the socket is closed the system gives the port to nobody who asks for *any* port, neither to a
    listener nor to an outgoing connection; a server that names it listens on it all the same.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do; TIME_WAIT does not matter
    held.bind((host, 0))
    return held


def last_lines(path: Path, start: str, count: int = 4, limit: int = 800) -> str:
    """The last lines of a log as one line, of the part after the last line that begins with `start`."""
    if not path.exists():
        return "(no log)"
    part = path.read_text(errors="replace").rpartition(start)[2].splitlines()[1:]
    lines = [line.strip() for line in part if line.strip()]
    return " | ".join(lines[-count:])[-limit:] or "(nothing logged)"
