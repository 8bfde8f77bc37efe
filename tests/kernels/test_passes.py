"""What all backends with passes of their own must do with plans, ages and parts of sequences."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slime_ext.correction import Correction, Plan, Tokens
from slime_ext.coupled import Normalize
from slime_ext.kernels import Eager, Work, built, loops
from slime_ext.kernels.chunks import Chunks
from slime_ext.kernels.loops import Loops
from slime_ext.kernels.vectors import Vectors
from slime_ext.metrics import Layout
from slime_ext.metrics.layout import POSITIONS
from slime_ext.objectives import Reinforce
from slime_ext.ops.segments import Segments
from slime_ext.steps import Clip, Reject, Reweight, Truncate
from tests.kernels.batches import FULL, assert_applied_alike, assert_same, random_tokens


def through_loops(correction):
    if built.compiler() is None:
        pytest.skip("needs a C++ compiler")
    return Loops(correction)


def through_vectors(correction):
    return Vectors(correction)


def through_triton(correction):
    pytest.importorskip("triton")
    from slime_ext.kernels.triton import Triton

    return Triton(correction)


each = pytest.mark.parametrize(
    "backend", [through_vectors, through_loops, pytest.param(through_triton, marks=pytest.mark.slow)]
)


@pytest.fixture(autouse=True)
def whatever_size(monkeypatch):
    """Small batches too, and nothing may fall back to eager in silence."""
    monkeypatch.setattr(loops, "SMALLEST", 0)
    monkeypatch.setattr(loops, "_library", built.library)


@each
def test_a_plan_reaches_the_second_pass(backend):
    packed = random_tokens([400, 600, 800])
    plan = Plan(scale=torch.tensor([1.0, 2.0, 3.0]), keep=torch.tensor([True, False, True]))
    expected, got = FULL(packed, plan, observe=True), backend(FULL).outcome(packed, plan, observe=True)
    assert_same(got, expected, packed.segments.mask, rtol=3e-6)
    assert torch.equal(got.scale, expected.scale)


@pytest.mark.slow
@each
def test_ages_reject_and_are_measured(backend):
    correction = Correction(steps=(Reject("token", "k3", high=0.5, max_staleness=3), Truncate(2.0)))
    packed = random_tokens([40, 60, 80, 20], wild=False)
    ages = torch.tensor([1.0, 5.0, torch.nan, 3.0])
    packed = Tokens(packed.segments, packed.proximal, packed.behavior, ages=ages)
    assert not backend(correction).outcome(packed).keep[40:100].any()
    assert_applied_alike(backend(correction), packed, None, 1e-5)


@pytest.mark.slow
@each
def test_a_surrogate_of_ours_is_measured_too(backend):
    correction = Correction("target", Reinforce(), (Reweight("token"), Clip(0.5, 2.0)))
    packed = random_tokens([900, 40, 300], wild=False)
    layout = Layout.of(correction)
    both = []
    for served in (Eager(correction), backend(correction)):
        target = packed.target.clone().requires_grad_()
        tokens = Tokens(packed.segments, packed.proximal, packed.behavior, target, packed.advantages)
        both.append(served.apply(Work(tokens, torch.zeros(1240), layout=layout)))
    torch.testing.assert_close(both[1].loss, both[0].loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(both[1].measured, both[0].measured, rtol=1e-5, atol=1e-5)


@each
@pytest.mark.parametrize("first", [True, False])
def test_nothing_is_measured_differently_on_a_rank_that_holds_parts(backend, first):
    lengths = (1300, 60, 700)
    whole = random_tokens(lengths)
    pieces = ((0, 90, 400, 0), (0, 800, 1300, 1), (2, 5, 700, 1))
    held = torch.cat([torch.arange(s, e) + sum(lengths[:i]) for i, s, e, _ in pieces])
    segments = Segments(lengths, pieces, whole.segments.full_mask, 2, lambda values: values * 1)
    mine = Tokens(segments, whole.proximal[held], whole.behavior[held])
    assert_applied_alike(backend(FULL), mine, None, 1e-5, first)


@each
def test_ranks_may_have_different_backends(backend):
    """All of them hand over the same numbers in the same order."""
    whole, handed = random_tokens([300, 60, 700], wild=False), []

    def all_sum(values):
        handed.append(values.clone())
        return values * 1

    segments = Segments(
        (300, 60, 700), ((0, 0, 300, 0), (2, 5, 700, 1)), whole.segments.full_mask, 2, all_sum
    )
    held = torch.cat([torch.arange(300), torch.arange(365, 1060)])
    mine = Tokens(segments, whole.proximal[held], whole.behavior[held])
    for served in (Eager(FULL), backend(FULL)):
        served.apply(Work(mine, torch.zeros(len(held)), layout=Layout.of(FULL)))
    expected, got = handed
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@each
@pytest.mark.parametrize("level", ["token", pytest.param("sequence", marks=pytest.mark.slow)])
def test_an_infinite_weight_on_a_loss_of_0_is_0(backend, level):
    correction = Correction(steps=(Reweight(level),))
    packed = random_tokens([300, 20], wild=False)
    packed = replace(packed, proximal=packed.proximal + 1000 * (torch.arange(320) >= 300))
    loss = torch.zeros(320, requires_grad=True)
    applied = backend(correction).apply(Work(packed, loss))
    applied.loss.sum().backward()
    assert not applied.loss.any() and loss.grad.isfinite().all() and loss.grad[300:].max() > 1e38


@pytest.mark.slow
@each
def test_a_mean_weight_below_any_float32_divides(backend):
    steps = (Reweight("sequence"), Truncate(2.0), Normalize())
    far = torch.tensor([-103.6, -300.0]).repeat_interleave(40) / 40
    behavior = torch.full((80,), -0.2)
    packed = Tokens(Segments.whole([40, 40], torch.ones(80, dtype=torch.bool)), behavior + far, behavior)
    weights = backend(Correction(steps=steps)).outcome(packed).weights
    torch.testing.assert_close(weights, torch.tensor([2.0, 0.0]).repeat_interleave(40))


@pytest.mark.parametrize("by_position", [False, True])
def test_chunks_hold_every_token_once_and_cross_no_border(by_position):
    lengths = (1300, 0, 60, 70000)
    pieces = ((0, 90, 400, 0), (0, 800, 1300, 1), (2, 15, 60, 1), (3, 0, 70000, 0))
    chunks = Chunks.of(Segments(lengths, pieces, torch.zeros(0), 2), by_position=by_position)
    begins, sizes, owners = chunks.begins.tolist(), chunks.sizes.tolist(), chunks.owners.tolist()
    assert [b + n for b, n in zip(begins, sizes, strict=True)][:-1] == begins[1:]
    held = [sum(n for n, o in zip(sizes, owners, strict=True) if o == s) for s in range(4)]
    assert held == [810, 0, 45, 70000] and max(sizes) <= chunks.lanes
    assert [owners.index(s) for s in range(4)] == chunks.offsets.tolist()[:-1]
    if by_position:
        within = [i for _, start, stop, _ in pieces for i in range(start, stop)]
        places = [p for p, n in zip(chunks.places.tolist(), sizes, strict=True) for _ in range(n)]
        assert places == [sum(i >= edge for edge in POSITIONS) for i in within]
