"""The Triton kernels on a CUDA device: the eager path's decisions, the same bits twice, no wait for the
device."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter is asked for: run without TRITON_INTERPRET", allow_module_level=True)
pytest.importorskip("triton")

from slime_ext.correction import Plan
from slime_ext.kernels import Eager, Work
from slime_ext.kernels.triton import Triton
from slime_ext.metrics import Layout
from tests.kernels.batches import (
    CORRECTIONS,
    FULL,
    assert_applied_alike,
    assert_same,
    of_oracle,
    random_tokens,
)

LENGTHS = ([5, 0, 300, 1, 64], [1], [131072], [40] * 3000, [200] * 50, [400] * 30, [1 << 20, 3])


def close_tokens(lengths, dtype=torch.float32):
    """Log-probs so close that long sequences are kept, in which every token has one."""
    long = max(lengths) > 1000
    return random_tokens(lengths, dtype, device="cuda", noise=2e-4 if long else 2e-3, wild=not long)


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}x{lengths[0]}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_kernels_decide_as_the_eager_path(name, dtype, lengths):
    packed = close_tokens(lengths, dtype)
    expected = CORRECTIONS[name](packed, observe=True)
    got = Triton(CORRECTIONS[name]).outcome(packed, observe=True)
    assert_same(got, expected, packed.segments.mask, rtol=1e-5)


def test_kernels_match_the_oracle():
    for seed in range(50):
        packed, keep, _ = of_oracle(seed, device="cuda")
        assert torch.equal(Triton(FULL).outcome(packed).keep.cpu(), keep), seed


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}x{lengths[0]}")
def test_loss_gradient_and_metrics_are_those_of_the_eager_path(lengths):
    assert_applied_alike(Triton(FULL), close_tokens(lengths), None, 1e-5)


def test_a_call_with_every_metric_launches_four_kernels():
    packed = random_tokens([3000, 50, 900], device="cuda")
    work = Work(packed, torch.zeros(3950, device="cuda"), Plan(), layout=Layout.of(FULL))
    Triton(FULL).apply(work)
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        Triton(FULL).apply(work)
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(names) <= 5 and sum("Memcpy" not in name for name in names) == 4, names


def test_the_same_bits_twice():
    packed = close_tokens([1 << 20, 3])
    loss = torch.randn(packed.segments.size, device="cuda", requires_grad=True)
    one, two = (Triton(FULL).apply(Work(packed, loss, layout=Layout.of(FULL))) for _ in range(2))
    assert torch.equal(one.loss, two.loss) and torch.equal(one.measured.sums, two.measured.sums)


def test_nothing_waits_for_the_device():
    packed = random_tokens([3000, 50, 900], device="cuda")
    loss = torch.randn(packed.segments.size, device="cuda", requires_grad=True)
    work = Work(packed, loss, Plan(), layout=Layout.of(FULL))
    Triton(FULL).apply(work)
    torch.cuda.set_sync_debug_mode("error")
    try:
        Triton(FULL).apply(work)
        Eager(FULL).apply(work)
    finally:
        torch.cuda.set_sync_debug_mode("default")
