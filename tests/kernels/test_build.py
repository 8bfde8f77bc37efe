"""The kernels compile to machine code of the device that they are for, on a machine that has none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton")


def printed(module, **more):
    """The words that a module prints in a process of its own, in which Triton interprets nothing."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | more
    command = [sys.executable, "-W", "ignore", "-m", module]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_kernels_compile_for_sm_90_and_keep_their_numbers_in_registers(tmp_path):
    """A thread has 255; what finds none goes to memory, but for 8 bytes that calls of functions take. Every
    kind of step at once takes 175 with Triton 3.9, 219 with 3.7, which PyTorch 2.13 brings."""
    limit = 224 if triton.__version__.startswith("3.7.") else 192
    lines = printed("tests.kernels.build_for_cuda", TRITON_CACHE_DIR=str(tmp_path))
    assert len(lines) == 14
    for kernel, registers, stack, *_ in lines:
        assert int(registers) <= limit and int(stack) <= 8, kernel


@pytest.mark.slow
def test_each_kernel_is_compiled_once_for_all_micro_batches():
    """Not again, which takes seconds, wherever an array begins and however many sequences and chunks there
    are."""
    kernels = ("correct", "reduced", "statistics", "totals")
    assert printed("tests.kernels.variants") == [[name, "1"] for name in kernels]
