"""Says what changed in hosts, engines and other systems since the releases that were run.

    python -m tests.releases [HOST_CHECKOUT ...]

Type it once a month. It asks the package index for the newest version of each distribution in
slime_ext/tools/releases.py. Of a peer with a newer one it prints which of the functions that we run have
changed, and compares ``convert`` with them. For each checkout it prints what ``tests.downstream.drift`` says.
The exit status is 1 if anything changed.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import warnings
from types import ModuleType

from slime_ext.tools.releases import Release, is_newer, newest
from tests.downstream import drift
from tests.peers import wheels
from tests.peers.__main__ import PEERS
from tests.peers.compare import compare

BLOCKS = 100


def newest_of(distribution: str) -> str:
    """Returns the newest version on the index; empty if the index does not say."""
    words = [*wheels.PIP, "index", "versions", "--ignore-requires-python", distribution]
    said = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    match = re.match(r"\S+ \((\S+)\)", said)
    return match[1] if match else ""


def changed_functions(distribution: str, version: str, before: str) -> list[str]:
    """Returns the functions and constants that we run and whose code differs between two versions."""
    old, new = (wheels.folder(distribution, each) for each in (before, version))
    taken = sorted((file, name) for file, name in wheels.TAKEN if (old / file).is_file())
    return [
        name for file, name in taken if wheels.text_of(old, file, name) != wheels.text_of(new, file, name)
    ]


def report(peer: ModuleType, release: Release, version: str) -> str:
    """Compares a newer version of a peer, and says what differs."""
    wheels.install(release.distribution, version)
    compare(peer, release.version, 3)  # because it takes the functions that the versions are compared by
    differ = ", ".join(changed_functions(release.distribution, version, release.version)) or "none"
    try:
        result = compare(peer, version, BLOCKS)
    except Exception as error:  # whatever a changed function raises
        return f"functions that differ: {differ}; the comparison ends with {type(error).__name__}: {error}"
    numbers = f"{result.losses} losses compared, {len(result.differences)} differ"
    return f"functions that differ: {differ}; {numbers}"


def main(checkouts: list[str]) -> int:
    logging.getLogger("slime_ext").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    wheels.install_all()
    of_distribution = {peer.NAME.replace("_", "-"): peer for peer in PEERS}
    changed = False
    for distribution, release in newest().items():
        version = newest_of(distribution)
        said = "the newest" if version else "not on the index"
        if version and is_newer(version, release.version):
            changed, said = True, f"{version} is on the index"
            if peer := of_distribution.get(distribution):
                said += f"; {report(peer, release, version)}"
        print(f"{release.title} {release.version}: {said}", flush=True)
    return int(changed or (bool(checkouts) and drift.main(checkouts) != 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
