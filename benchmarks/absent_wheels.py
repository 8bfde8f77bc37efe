"""The wheels of a folder whose distribution this Python does not have, one path per line.

    python benchmarks/absent_wheels.py DIR

Standard library alone: it runs before anything is installed.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

UNPACKED = ("miles_rl",)


def absent(folder: Path) -> list[Path]:
    """The wheels in ``folder`` whose distribution is not installed, by name; not the host's, which brings a
    megatron and an sglang of its own and is unpacked in part (benchmarks/on_cuda/host.py)."""
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
