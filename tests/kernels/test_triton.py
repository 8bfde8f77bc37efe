"""The Triton kernels through Triton's interpreter: the eager path's decisions, and the oracle's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from slime_ext.correction import Plan
from slime_ext.kernels import Work
from slime_ext.kernels.triton import Triton
from slime_ext.kernels.triton_text import Triton as Language
from slime_ext.metrics import Layout
from tests.kernels.batches import (
    CORRECTIONS,
    EVERY,
    FULL,
    assert_applied_alike,
    assert_same,
    of_oracle,
    random_tokens,
)

LENGTHS = ([5, 0, 300, 1, 64], [1], [700])


@pytest.mark.slow
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_kernels_decide_as_the_eager_path(name, dtype, lengths):
    packed = random_tokens(lengths, dtype)
    for how in ({}, {"bounds": True}, {"observe": True}):
        expected = CORRECTIONS[name](packed, **how)
        got = Triton(CORRECTIONS[name]).outcome(packed, **how)
        assert_same(got, expected, packed.segments.mask, rtol=2e-5)


def test_kernels_match_the_oracle():
    for seed in range(10):
        packed, keep, weights = of_oracle(seed)
        got = Triton(FULL).outcome(packed)
        assert torch.equal(got.keep, keep), seed
        torch.testing.assert_close(got.weights, weights, rtol=1e-11, atol=1e-12)


def test_the_same_bits_twice():
    packed = random_tokens([5000, 3])
    first, second = (Triton(FULL).outcome(packed).weights for _ in range(2))
    assert torch.equal(first, second)


def test_nothing_at_all():
    assert Triton(FULL).outcome(random_tokens([])).weights.shape == (0,)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [None, torch.tensor([1.0, 2.0, 0.5])], ids=["plain", "scaled"])
def test_loss_gradient_and_metrics_are_those_of_the_eager_path(scale):
    packed = random_tokens([90, 40, 300], noise=2e-3)
    assert_applied_alike(Triton(FULL), packed, Plan(scale=scale), 1e-5)


@pytest.mark.slow
def test_arrays_with_gaps_are_read_as_they_are():
    """Kernels know no strides."""
    packed = random_tokens([90, 40, 300])

    def gapped(values):
        return torch.stack([values, values.flip(0)], 1)[:, 0]

    names = ("proximal", "behavior", "target", "advantages")
    mask = replace(packed.segments, full_mask=gapped(packed.segments.mask))
    loose = replace(packed, segments=mask, **{name: gapped(getattr(packed, name)) for name in names})
    for correction in (FULL, EVERY):
        losses = torch.linspace(-1, 1, 430), gapped(torch.linspace(-1, 1, 430))
        expected, got = (
            Triton(correction).apply(Work(tokens, loss, layout=Layout.of(correction)))
            for tokens, loss in zip((packed, loose), losses, strict=True)
        )
        assert torch.equal(got.loss, expected.loss) and torch.equal(got.measured.sums, expected.measured.sums)


def test_numbers_beside_float64_have_its_digits():
    """Triton 3.4 and 3.5 take a bare number for a float32."""
    assert Language().number(0.1, wide=True) == "tl.full((), 0.1, tl.float64)"
    assert Language().number(0.1) == "tl.full((), 0.1, WIDE)"
    assert Language().number(0.0) == "0.0"
