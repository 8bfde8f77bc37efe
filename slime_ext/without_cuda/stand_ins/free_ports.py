"""A range of ports for each run, so that two runs that start together do not choose the same ports.

Every release of slime and miles takes the first port that is free from 15000 on (utils/misc.py,
get_free_port) and binds it half a minute later, when SGLang is up; in between another run finds it free. On
a cluster one run has a node to itself.
"""

from __future__ import annotations

import functools
import os
import zlib
from types import ModuleType

from slime_ext.launcher.rollout.processes import MARK
from slime_ext.without_cuda.import_hooks import ImportHooks

FIRST, RANGES, WIDTH = 20000, 120, 100  # below the ports that Linux gives to clients (32768 on)


def install(hooks: ImportHooks) -> None:
    """Raises the first port that the hosts look at to the start of this run's range."""
    for host in ("miles", "slime"):
        hooks.after(f"{host}.utils.misc", start_at_own_range)


def start_at_own_range(misc: ModuleType) -> None:
    """Gives the host's `get_free_port` the range that the run's mark falls into."""
    free, own = misc.get_free_port, FIRST + WIDTH * (zlib.crc32(os.environ.get(MARK, "").encode()) % RANGES)

    @functools.wraps(free)
    def get_free_port(start_port: int = own, consecutive: int = 1) -> int:
        return free(max(start_port, own), consecutive)

    misc.get_free_port = get_free_port
