"""Servers that listen on the address that others are given, 127.0.0.1 here, instead of on every one.

torch 2.13's TCPStore takes its master's address and listens on [::]; anybody who reaches the port reads and
writes what the ranks tell each other.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from types import ModuleType


def bind_stores(rendezvous: ModuleType) -> None:
    """Replaces torch.distributed.TCPStore by one that listens on its own address alone."""

    class TCPStore(rendezvous.TCPStore):
        def __init__(
            self,
            host_name: str,
            port: int,
            world_size: int | None = None,
            is_master: bool = False,
            *args: object,
            **options: object,
        ) -> None:
            if is_master and "master_listen_fd" not in options:
                with contextlib.suppress(OSError):  # taken: by a store of this process, which torch shares
                    server = socket.create_server((host_name, port), backlog=512)
                    port = server.getsockname()[1]
                    options["master_listen_fd"] = server.detach()
            super().__init__(host_name, port, world_size, is_master, *args, **options)

    sys.modules["torch.distributed"].TCPStore = rendezvous.TCPStore = TCPStore  # it is being imported
