"""Prints the wheels of a folder that this Python lacks, one path per line.

    python benchmarks/absent_wheels.py DIR

Uses only the standard library, because it runs before anything is installed.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

UNPACKED = ("miles_rl",)


def absent(folder: Path) -> list[Path]:
    """Returns the wheels in a folder that are not installed, sorted by name.

    Leaves out the host's wheel, because it contains a separate megatron and sglang
    (benchmarks/on_cuda/host.py unpacks a part of it).
    """
    named = {wheel: wheel.name.split("-")[0] for wheel in sorted(folder.glob("*.whl"))}
    return [wheel for wheel, name in named.items() if name not in UNPACKED and not _is_installed(name)]


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    print("\n".join(str(wheel) for wheel in absent(Path(sys.argv[1]))), end="")
