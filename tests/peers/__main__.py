"""Compares converted settings with the peers' wheels, and prints a Markdown table.

python -m tests.peers [--blocks 300]

The exit status is 1 if a loss or gradient differs, or a key is neither read nor named.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from types import ModuleType

from tests.peers import areal, ms_swift, openrlhf, rlinf, skyrl, trl, verl
from tests.peers.compare import Comparison, compare
from tests.peers.wheels import install_all

PEERS: tuple[ModuleType, ...] = (verl, skyrl, trl, openrlhf, areal, ms_swift, rlinf)
HEAD = (
    "| system | release | blocks | refused | losses and gradients compared | differences | largest | keys "
    "neither read nor named |"
)


def row(peer: ModuleType, version: str, found: Comparison) -> str:
    numbers = (found.blocks, found.refused, found.losses, len(found.differences), f"{found.largest:.0e}")
    return f"| {' | '.join(map(str, (peer.NAME, version, *numbers, len(found.unnamed))))} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=300, help="random blocks of each release, on 3 batches")
    args = parser.parse_args()
    install_all()
    logging.getLogger("slime_ext").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    print(f"{HEAD}\n|{' --- |' * 8}")
    faults = []
    for peer in PEERS:
        for version in peer.VERSIONS:
            found = compare(peer, version, args.blocks)
            print(row(peer, version, found), flush=True)
            faults += [*found.differences, *found.unnamed]
    print(*faults, sep="\n", file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
