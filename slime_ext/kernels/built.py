"""C++ text to a loaded library, once for each machine: what was built is kept in the user's cache folder."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from slime_ext.errors import SlimeExtError

# No -ffast-math: NaN and inf are data here. Products may be fused with sums: those of what is compared with a
# bound are by powers of two, which round to the same.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-funroll-loops",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)
FLAGS += ("-fPIC", "-shared", "-w")


class BuildError(SlimeExtError, RuntimeError):
    """A compiler that is there cannot build."""


def compiler() -> str | None:
    """The C++ compiler's path: of the variable CXX, g++ or clang++."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))), None)


def library(text: str) -> ctypes.CDLL:
    """The library of a C++ file.

    Raises:
        BuildError: the compiler refuses it or takes more than two minutes, or what it built cannot be loaded.
    """
    found = compiler()
    if found is None:
        raise BuildError("slime_ext.backend: expected a C++ compiler, got none: install g++, or set CXX")
    name = hashlib.sha256(f"{_machine(found)}\n{text}".encode()).hexdigest()[:32]
    path = cache_folder() / f"{name}.so"
    if not path.exists():
        _build(found, text, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"slime_ext.backend: expected a library in {path}, got {error}") from error


def _build(found: str, text: str, path: Path) -> None:
    """Builds beside the place and moves it there, so that no process loads half a library."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        source, built = Path(folder, "kernels.cpp"), Path(folder, "kernels.so")
        source.write_text(text)
        _run([found, *FLAGS, "-o", str(built), str(source)])
        built.replace(path)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"slime_ext.backend: expected {command[0]} to build, got {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["nothing said"]
        said = next((line for line in lines if "error" in line), lines[0])
        raise BuildError(f"slime_ext.backend: expected {command[0]} to build, got '{said}'")
    return done.stderr


@functools.cache
def _machine(found: str) -> str:
    """What the compiler makes of this processor: a cache folder may be shared by machines that differ."""
    return _run([found, *FLAGS, "-###", "-c", "-x", "c++", os.devnull, "-o", os.devnull])


@functools.cache
def cache_folder() -> Path:
    """The user's cache folder, or one of this process where that cannot be written."""
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        root = Path(cache, "slime_ext", "kernels")
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=root).close()
    except (OSError, RuntimeError):
        return Path(tempfile.mkdtemp(prefix="slime_ext_"))
    return root
