"""The kernels compile to machine code of the device that they are for, on a machine that has none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
def test_kernels_compile_for_sm_90(tmp_path):
    plain = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env = plain | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.build_for_cuda"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = [int(word) for line in done.stdout.splitlines() for word in line.split()[2:]]
    assert len(sizes) == 8 and min(sizes) > 1000
