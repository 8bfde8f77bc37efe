"""The part of the CUDA program that trains, on a CPU: what it calls of the launcher is still there."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRAIN = "import json; from benchmarks import on_cuda; print(json.dumps(on_cuda.train(2, 8)))"


def test_its_trainer_trains():
    command = [sys.executable, "-W", "ignore", "-c", TRAIN]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-500:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["backend"] == "gloo" and all(map(math.isfinite, found["losses"]))
