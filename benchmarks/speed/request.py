"""Lists what can be timed, and the allocator's settings. Imports no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from slime_ext_cpu.machine import KEEP_MEMORY

WORKLOADS = {
    "a": "512 sequences of ragged length, 64 to 16k",
    "b": "64 x 8192",
    "c": "4096 sequences of 64 to 192",
    "d": "1 x 131072",
    "e": "64 x 131072",
}
CONFIGS = {"T": "token weights with a cap", "S": "sequence weights with a cap, geometric mask, veto"}
ROOT = Path(__file__).parents[2]


def settled_allocator() -> bool:
    """Whether this process keeps freed memory for the next call, as every figure assumes."""
    return all(os.environ.get(key) == value for key, value in KEEP_MEMORY.items())


def again(words: Sequence[str], python: str = sys.executable) -> int:
    """Runs ``python -m benchmarks.speed`` again with the allocator's settings. Returns its exit status."""
    env = os.environ | KEEP_MEMORY | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    start = [python, "-W", "ignore", "-m", "benchmarks.speed", *words]
    return subprocess.run(start, env=env, check=False).returncode
