"""Lists the releases of hosts, engines and other systems that this version was run against.

Tests read the table. What the pages say of a system is of the newest release here.
"""

from __future__ import annotations

from typing import NamedTuple


class Release(NamedTuple):
    """A release that was run.

    Args:
        title: the name that the system gives itself.
        version: a version of the package index, or a commit.
        run: the day on which its tests ran last.
        distribution: its name on the package index; empty for a checkout.
        where: what runs it.
    """

    title: str
    version: str
    run: str
    distribution: str = ""
    where: str = ""


PEERS = (
    Release("verl", "0.9.1", "2026-11-28", "verl", "convert, adapter"),
    Release("verl", "0.8.0", "2026-11-28", "verl", "convert"),
    Release("verl", "0.7.0", "2026-11-28", "verl", "convert"),
    Release("verl", "0.6.1", "2026-11-28", "verl", "convert"),
    Release("SkyRL", "0.4.0", "2026-11-28", "skyrl", "convert"),
    Release("TRL", "1.16.0", "2026-11-28", "trl", "convert"),
    Release("OpenRLHF", "0.11.2", "2026-11-28", "openrlhf", "convert"),
    Release("AReaL", "1.0.4", "2026-11-28", "areal", "convert"),
    Release("ms-swift", "4.6.0", "2026-11-28", "ms-swift", "convert"),
)
