"""Numpy's lines: decisions and measures as operation by operation, in any dtype and any shape."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from slime_ext import presets
from slime_ext.correction import Correction, Plan, Tokens
from slime_ext.kernels import Eager, Work, backend_for, vectors
from slime_ext.kernels.loops import Loops
from slime_ext.kernels.vector_text import program
from slime_ext.kernels.vectors import Vectors
from slime_ext.metrics import Layout
from slime_ext.metrics.layout import BINS
from slime_ext.objectives import Host
from slime_ext.ops.segments import Segments
from slime_ext.steps import Reject, Reweight, Truncate, Veto
from tests.kernels.batches import (
    CORRECTIONS,
    FULL,
    assert_applied_alike,
    assert_same,
    of_oracle,
    random_tokens,
)

LENGTHS = ([40000], [700, 0, 900], [1] * 1500, [2048, 31, 1], [5, 0, 300, 1, 64], [256] * 8, [1], [0, 0], [])
SERVED = [name for name in presets.PRESETS if type(backend_for(presets.get(name), "cpu", "eager")) is Vectors]
WEIGHTED = [name for name in SERVED if isinstance(presets.get(name).surrogate, Host)]
OWN = [name for name, each in CORRECTIONS.items() if isinstance(each.surrogate, Host)]


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


HIGH = Reject("sequence", "ratio", "sum", high=1e30)
PLANS = [
    None,
    Plan(scale=torch.tensor([1.0, 2.0, 0.5])),
    Plan(keep=torch.tensor([True, False, True])),
    Plan(scale=torch.tensor([1.0, 2.0, 0.5]), keep=torch.tensor([False, True, True])),
]


def clean(packed):
    """Every token of the response, with a finite log-prob: what nearly all batches are."""
    mask = torch.ones(packed.segments.size, dtype=torch.bool)
    behavior = packed.behavior.nan_to_num(-1.0, -1.0, -1.0)
    return replace(packed, segments=Segments.whole(packed.segments.lengths, mask), behavior=behavior)


def test_nearly_every_preset_is_served():
    assert {"token_is", "seq_mis", "decoupled_geo_rs_seq_tis", "topr", "icepop", "m2"} <= set(SERVED)
    assert type(backend_for(presets.get("turn_tis"), "cpu", "eager")) is Eager
    assert type(backend_for(FULL, "cuda", "eager")) is Eager


@pytest.mark.parametrize("whole", [False, True], ids=["wild", "whole"])
@pytest.mark.parametrize("name", [*OWN, *(slow(name) for name in WEIGHTED if name not in OWN)])
def test_decisions_loss_and_metrics_are_those_operation_by_operation(name, whole):
    """1e-6: sums are added in another order; weights beside a cap may differ in the last bit."""
    correction = CORRECTIONS.get(name) or presets.get(name)
    for seed, lengths in enumerate(LENGTHS):
        packed = random_tokens(lengths, seed=seed, noise=2e-3 if name == "full" else 0.3, wild=not whole)
        packed = clean(packed) if whole else packed
        if correction.needs_ages:
            packed = replace(packed, ages=torch.arange(len(lengths)).double())
        expected = correction(packed, observe=True)
        assert_same(Vectors(correction).outcome(packed, observe=True), expected, packed.segments.mask, 3e-6)
        assert_applied_alike(Vectors(correction), packed, None, 1e-6)


@pytest.mark.parametrize("how", [{}, {"bounds": True}, {"observe": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, slow(torch.bfloat16), slow(torch.float16)])
@pytest.mark.parametrize("name", ["full", "every", "token_tis"])
def test_what_was_asked_for_is_handed_out(how, dtype, name):
    packed = random_tokens([700, 0, 900, 3], dtype, noise=2e-3)
    expected, got = (served(CORRECTIONS[name]).outcome(packed, **how) for served in (Eager, Vectors))
    assert_same(got, expected, packed.segments.mask, rtol=3e-6)
    assert got.weights.dtype is expected.weights.dtype


@pytest.mark.parametrize("plan", PLANS, ids=["none", "scale", "group", "both"])
@pytest.mark.parametrize("name", ["full", "every", "token_tis", "shared"])
@pytest.mark.parametrize("whole", [False, True], ids=["wild", "whole"])
def test_a_plan_acts_as_it_does_operation_by_operation(plan, name, whole):
    packed = random_tokens([900, 40, 300], noise=0.01)
    correction = CORRECTIONS[name]
    if name == "shared" and plan is not None:
        plan = replace(plan, numbers={correction.steps[-1]: torch.tensor(0.97, dtype=torch.float64)})
    assert_applied_alike(Vectors(correction), clean(packed) if whole else packed, plan, 1e-6)


def test_the_oracle_is_matched():
    backend = Vectors(FULL)
    for seed in range(200):
        # float32: a log-ratio is rounded, 4e-6 for log-probs of 50 nats, and the weight with it
        for dtype, rtol in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
            packed, keep, weights = of_oracle(seed, dtype)
            got = backend.outcome(packed)
            assert torch.equal(got.keep, keep), seed
            torch.testing.assert_close(got.weights.double(), weights, rtol=rtol, atol=0)


def test_a_veto_falls_at_the_same_number():
    correction = Correction(steps=(Veto(low=1e-4, high=50.0),))
    low, high = (torch.tensor([limit]).double().log().float() for limit in (1e-4, 50.0))
    near = torch.cat([edge.nextafter(to) for edge in (low, high) for to in (edge - 1, edge, edge + 1)])
    log_ratio = torch.zeros(6, 300)
    log_ratio[:, 150] = near
    nothing = torch.zeros(1800)
    tokens = Tokens(Segments.whole([300] * 6, nothing == 0), log_ratio.view(-1), nothing)
    keep = Vectors(correction).outcome(tokens).keep
    assert keep.view(6, 300)[:, 0].tolist() == [False, True, True, True, True, False]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("whole", [False, True], ids=["wild", "whole"])
def test_tokens_without_a_ratio_are_neither_highest_nor_lowest(sign, whole):
    packed = random_tokens([300, 200])
    packed = clean(packed) if whole else packed
    tokens = Tokens(packed.segments, packed.behavior + sign * 0.01, packed.behavior)
    work = Work(tokens, torch.zeros(500), layout=Layout.of(FULL, curves=False))
    expected = sign * torch.tensor([0.01, -0.01], dtype=torch.float64)
    torch.testing.assert_close(Vectors(FULL).apply(work).measured.highest[:2], expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "limits", [(), (Reject("sequence", "ratio", "sum", high=1e30),)], ids=["kept", "not"]
)
@pytest.mark.parametrize("level", ["sequence", "token"])
def test_weights_beyond_float32_are_measured(limits, level):
    correction = Correction(steps=(Reweight(level), *limits))
    packed = random_tokens([300] * 4, wild=False)
    far = torch.tensor([0.0, 30.0, 65.0, 200.0]).repeat_interleave(300) / (270 if level == "sequence" else 1)
    work = Work(Tokens(packed.segments, packed.behavior + far, packed.behavior), torch.zeros(1200))
    work = replace(work, layout=Layout.of(correction))
    expected, got = (each(correction).apply(work).measured for each in (Eager, Vectors))
    assert expected.highest[2].isinf() == (not limits)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("span", [None, (0.3, 5), (-5, -0.3)], ids=str)
def test_what_is_1_less_loses_nothing(span):
    log_ratio = torch.logspace(-30, -1, 4000) if span is None else torch.linspace(*span, 4000)
    nothing = torch.zeros_like(log_ratio)
    tokens = Tokens(Segments.whole([4000], nothing == 0), log_ratio, nothing)
    layout = Layout.of(FULL, curves=False)
    sums = Vectors(FULL).apply(Work(tokens, nothing, layout=layout)).measured.sums
    for name, expected in (("excess", log_ratio.double().expm1()), ("k3", log_ratio.expm1() - log_ratio)):
        found = sums[layout.names.index(name)]
        torch.testing.assert_close(found, expected.double().sum(), rtol=1e-6, atol=0)


def test_every_bin_counts_what_lies_in_it():
    edges = torch.tensor([2.0**-20, 2.0**7])
    sizes = torch.cat([edges, edges.nextafter(torch.zeros(2)), torch.tensor([0.0, 1e-30, 1.03, 200.0])])
    log_ratio = torch.cat([sizes, -sizes]).repeat(100)
    tokens = Tokens(Segments.whole([1600], log_ratio < math.inf), log_ratio, torch.zeros(1600))
    layout = Layout.of(FULL, curves=False)
    got = Vectors(FULL).apply(Work(tokens, torch.zeros(1600), layout=layout)).measured.sums[-BINS:]
    side = BINS // 2
    # 2^-20 in the first bin, 1.03 in the first of [1, 2), just below 2^7 in the last, 2^7 and 200 beyond;
    # just below 2^-20, 1e-30 and 0 in none
    expected = torch.zeros(BINS, dtype=torch.float64)
    for start in (0, side):
        for place, many in ((0, 100), (20 * 16, 100), (27 * 16 - 1, 100), (27 * 16, 200)):
            expected[start + place] = many
    assert torch.equal(got, expected)


def test_a_trainer_that_is_nan_is_told():
    packed = random_tokens([300, 200], wild=False)
    packed.proximal[5] = torch.nan
    work = Work(packed, torch.ones(500), layout=Layout.of(FULL))
    expected, got = (each(FULL).apply(work) for each in (Eager, Vectors))
    assert torch.equal(got.keep, expected.keep)
    torch.testing.assert_close(got.measured, expected.measured, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["full", "token_tis"])
def test_losses_of_other_dtypes_keep_theirs(dtype, name):
    packed = random_tokens([300, 200], noise=0.01)
    losses = [torch.linspace(-1, 1, 500).to(dtype).requires_grad_() for _ in range(2)]
    works = [Work(packed, loss, layout=Layout.of(CORRECTIONS[name])) for loss in losses]
    expected, got = (
        each(CORRECTIONS[name]).apply(work) for each, work in zip((Eager, Vectors), works, strict=True)
    )
    for applied in (expected, got):
        applied.loss.sum().backward()
    assert got.loss.dtype is dtype
    torch.testing.assert_close(got.loss, expected.loss)
    torch.testing.assert_close(losses[1].grad, losses[0].grad)


@pytest.mark.parametrize("name", [*OWN, "token_is"])
@pytest.mark.parametrize("whole", [False, True], ids=["wild", "whole"])
def test_what_is_handed_over_is_not_written_to_and_what_is_handed_back_may_be(name, whole):
    correction = CORRECTIONS.get(name) or presets.get(name)
    packed = random_tokens([300, 200], noise=0.01)
    packed = clean(packed) if whole else packed
    loss = torch.linspace(-1, 1, 500).requires_grad_()
    given = [packed.proximal, packed.behavior, packed.advantages, packed.segments.mask, loss]
    before = [values.detach().clone() for values in given]
    applied = Vectors(correction).apply(Work(packed, loss, layout=Layout.of(correction)))
    kept = applied.loss.detach().clone()
    for values in applied.channel:
        values.fill_(7)
    applied.loss.sum().backward()
    torch.testing.assert_close(applied.loss.detach(), kept)
    torch.testing.assert_close(loss.grad * before[4], kept)
    for values, same in zip(given, before, strict=True):
        torch.testing.assert_close(values.detach(), same, rtol=0, atol=0, equal_nan=True)


def test_log_probs_with_a_gradient_and_with_gaps():
    packed = random_tokens([300, 200], noise=0.01)
    gaps = replace(
        packed,
        proximal=packed.proximal.repeat_interleave(2)[::2].requires_grad_(),
        behavior=packed.behavior.repeat_interleave(2)[::2],
    )
    loss = torch.linspace(-1, 1, 1000)[::2]
    expected, got = (
        each.apply(Work(tokens, loss, layout=Layout.of(FULL)))
        for each, tokens in ((Eager(FULL), packed), (Vectors(FULL), gaps))
    )
    torch.testing.assert_close(got.loss, expected.loss)
    torch.testing.assert_close(got.measured, expected.measured, rtol=1e-6, atol=1e-6)


def test_what_changes_nothing_is_not_written():
    """The whole text of a correction: a geometric mask before capped sequence weights."""
    correction = Correction(steps=(Reject("sequence", "ratio", "mean", high=1.01), Reweight("sequence")))
    text = program(
        replace(correction, steps=(*correction.steps, Truncate(2.0))), correction.needs(), notes=False
    )
    body = [line.strip() for line in text.text.splitlines()[1:]]
    assert body == [
        "s0, s1, = table",
        "kept, all_w, all_clipped, never = True, 1.0, False, False",
        "inside1 = s0 < INF",
        "kept = inside1",
        "mean2 = (s1 / maximum(s0, 1.0))",
        "inside3 = (mean2 <= 0.009950330853168092)",
        "kept = kept & inside3",
        "ratio4 = narrow(exp(s1))",
        "all_w = ratio4",
        "bounded5 = minimum(all_w, 2.0)",
        "all_w = bounded5",
        "keep, w, clipped, nowhere = finite, all_w, all_clipped, False",
        "return kept, [], keep, w, clipped, {}",
    ]


@pytest.mark.parametrize("of", [Vectors, Loops])
def test_the_lines_of_a_correction_are_written_once(of, monkeypatch):
    """Also where small batches come to them from another backend."""
    written = []
    monkeypatch.setattr(vectors, "program", lambda *how, **more: written.append(1) or program(*how, **more))
    backend, packed = of(FULL), random_tokens([30, 20])
    for _ in range(3):
        backend.apply(Work(packed, torch.zeros(50), layout=Layout.of(FULL)))
    assert len(written) == 1


def test_every_preset_keeps_its_backend():
    """What-if asks for all of them in turn, part after part."""
    first, again = (
        [backend_for(presets.get(name), "cpu", "eager") for name in presets.PRESETS] for _ in range(2)
    )
    assert all(one is other for one, other in zip(first, again, strict=True))
