"""A range of ports for each run, so that two runs side by side do not choose the same ports.

Every release of slime and miles takes the first port that is free from 15000 on (utils/misc.py,
get_free_port) and binds it half a minute later, when SGLang is up; in between another run finds it free. On
a cluster one run has a node to itself.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from slime_ext.errors import ConfigError

VARIABLE = "SLIME_EXT_FIRST_PORT"
FIRST, RANGES, WIDTH = 20000, 120, 100  # below the ports that Linux gives to clients (32768 on)


@contextmanager
def own_range() -> Iterator[int]:
    """The first port of a range that no other run has: its last port is bound until the end.

    Raises:
        ConfigError: all are taken.
    """
    for i in range(RANGES):
        first = FIRST + WIDTH * ((os.getpid() + i) % RANGES)
        with socket.socket() as claim:
            try:
                claim.bind(("127.0.0.1", first + WIDTH - 1))
            except OSError:
                continue
            yield first
            return
    raise ConfigError(f"ports: expected a free range from {FIRST} on, got {RANGES} runs: end some")


def start_at_own_range(misc: ModuleType) -> None:
    """Gives the host's `get_free_port` the range of this run."""
    free, own = misc.get_free_port, int(os.environ.get(VARIABLE, FIRST))

    @functools.wraps(free)
    def get_free_port(start_port: int = own, consecutive: int = 1) -> int:
        return free(max(start_port, own), consecutive)

    misc.get_free_port = get_free_port
