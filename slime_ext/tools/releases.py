"""Lists the releases of hosts, engines and other systems that this version was run against.

Tests and ``slime-ext doctor`` read the table. What the pages say of a system is of its newest release here.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Release(NamedTuple):
    """A release that was run.

    Args:
        title: the name that the system gives itself.
        version: a version of the package index, or a tag or commit.
        run: the day on which its tests ran last.
        distribution: its name on the package index; empty for a checkout.
    """

    title: str
    version: str
    run: str
    distribution: str = ""


HOSTS = (  # tests/downstream
    *(Release("slime", f"v0.{version}", "2026-11-28") for version in ("2.0", "2.1", "2.2", "2.3", "2.4")),
    *(Release("slime", version, "2026-11-28") for version in ("v0.3.0", "v0.3.1", "624b824", "2e5cd7c")),
    *(Release("miles", version, "2026-11-28") for version in ("31f1ca9", "1718d16")),
    Release("miles", "0.0.2", "2026-11-28", "miles-rl"),
)
ENGINES = (Release("SGLang", "0.5.23", "2026-11-28", "sglang"),)  # slime_ext_cpu
PEERS = (  # tests/peers; of each system the newest first
    *(Release("verl", version, "2026-11-28", "verl") for version in ("0.9.1", "0.8.0", "0.7.0", "0.6.1")),
    Release("SkyRL", "0.4.0", "2026-11-28", "skyrl"),
    Release("TRL", "1.16.0", "2026-11-28", "trl"),
    Release("OpenRLHF", "0.11.2", "2026-11-28", "openrlhf"),
    Release("AReaL", "1.0.4", "2026-11-28", "areal"),
    Release("ms-swift", "4.6.0", "2026-11-28", "ms-swift"),
    Release("RLinf", "0.3.0", "2026-11-29", "rlinf"),
)
RELEASES = (*HOSTS, *ENGINES, *PEERS)


def newest() -> dict[str, Release]:
    """Returns the newest release of each distribution that was run."""
    latest: dict[str, Release] = {}
    for release in RELEASES:
        if release.distribution:
            latest.setdefault(release.distribution, release)
    return latest


def is_newer(version: str, other: str) -> bool:
    """Whether a version comes after another, by their numbers.

    >>> is_newer("0.10.0", "0.9.1"), is_newer("0.9.1", "0.9.1"), is_newer("0.9", "0.9.1")
    (True, False, False)
    """
    first, second = ([int(number) for number in re.findall(r"\d+", each)] for each in (version, other))
    return first > second
