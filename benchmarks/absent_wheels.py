"""The wheels of a folder whose distribution this Python does not have, one path per line.

    python benchmarks/absent_wheels.py DIR

Standard library alone: it runs before anything is installed.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path


def absent(folder: Path) -> list[Path]:
    """The wheels in ``folder`` whose distribution is not installed, by name."""
    return [wheel for wheel in sorted(folder.glob("*.whl")) if not _is_installed(wheel.name.split("-")[0])]


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    print("\n".join(str(wheel) for wheel in absent(Path(sys.argv[1]))), end="")
