"""The C++ loops: the eager path's decisions and measures, built once, safe where nothing can be built."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from slime_ext.correction import Correction, Plan, Tokens
from slime_ext.kernels import Eager, Work, built, loops
from slime_ext.kernels.loops import SMALLEST, Loops
from slime_ext.metrics import Layout
from slime_ext.metrics.layout import BINS, CURVE_BINS, CURVE_COLUMNS, CURVES
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

pytestmark = pytest.mark.skipif(built.compiler() is None, reason="needs a C++ compiler")
LENGTHS = ([131072], [700, 0, 900], [1] * 1500, [3] * 400, [2048, 31, 1], [5, 0, 300, 1, 64], [1])


@pytest.fixture(autouse=True)
def whatever_size(monkeypatch):
    """Small batches too, and nothing may fall back to eager in silence."""
    monkeypatch.setattr(loops, "SMALLEST", 0)
    monkeypatch.setattr(loops, "_library", built.library)


def agree(correction, packed, **how):
    """3e-6: the eager path adds 32 log-ratios at a time in float32, and weights take over that error."""
    expected, got = correction(packed, **how), Loops(correction).outcome(packed, **how)
    assert_same(got, expected, packed.segments.mask, rtol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", CORRECTIONS)
def test_loops_decide_as_the_eager_path(name):
    for seed, lengths in enumerate(LENGTHS):
        packed = random_tokens(lengths, seed=seed, noise=2e-3 if name == "full" else 0.3)
        agree(CORRECTIONS[name], packed, observe=True)


@pytest.mark.parametrize(
    "how",
    [*(pytest.param(how, marks=pytest.mark.slow) for how in ({}, {"bounds": True})), {"observe": True}],
    ids=str,
)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(x, marks=pytest.mark.slow) for x in (torch.bfloat16, torch.float16))],
)
def test_loops_hand_out_what_was_asked_for(how, dtype):
    agree(FULL, random_tokens([700, 0, 900, 3], dtype, noise=2e-3), **how)


@pytest.mark.parametrize("plan", [None, Plan(scale=torch.tensor([1.0, 2.0, 0.5]))], ids=["plain", "scaled"])
def test_loss_gradient_and_metrics_are_those_of_the_eager_path(plan):
    assert_applied_alike(Loops(FULL), random_tokens([900, 40, 300], noise=2e-3), plan, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}x{lengths[0]}")
def test_every_shape_is_measured_as_the_eager_path_does(lengths):
    correction = CORRECTIONS["every"]
    assert_applied_alike(Loops(correction), random_tokens(lengths), None, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shared", "handed on"])
def test_weights_of_sequences_are_measured_as_the_eager_path_does(name):
    assert_applied_alike(Loops(CORRECTIONS[name]), random_tokens([900, 3, 0, 40, 300]), None, 1e-6)


def test_a_veto_falls_at_the_same_number():
    correction = Correction(steps=(Veto(low=1e-4, high=50.0),))
    low, high = (torch.tensor([limit]).double().log().float() for limit in (1e-4, 50.0))
    near = torch.cat([edge.nextafter(to) for edge in (low, high) for to in (edge - 1, edge, edge + 1)])
    log_ratio = torch.zeros(6, 300)
    log_ratio[:, 150] = near
    nothing = torch.zeros(1800)
    tokens = Tokens(Segments.whole([300] * 6, nothing == 0), log_ratio.view(-1), nothing)
    keep = correction(tokens).keep
    assert keep.view(6, 300)[:, 0].tolist() == [False, True, True, True, True, False]
    assert torch.equal(Loops(correction).outcome(tokens).keep, keep)


@pytest.mark.parametrize("sign", [1, -1])
def test_tokens_without_a_ratio_are_neither_highest_nor_lowest(sign):
    packed = random_tokens([300, 200])
    tokens = Tokens(packed.segments, packed.behavior + sign * 0.01, packed.behavior)
    work = Work(tokens, torch.zeros(500), layout=Layout.of(FULL))
    assert not packed.behavior.isfinite().all()
    expected = sign * torch.tensor([0.01, -0.01], dtype=torch.float64)
    torch.testing.assert_close(Loops(FULL).apply(work).measured.highest[:2], expected, rtol=1e-4, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "limits", [(), (Reject("sequence", "ratio", "sum", high=1e30),)], ids=["kept", "not"]
)
def test_weights_beyond_float32_are_measured(limits):
    correction = Correction(steps=(Reweight("sequence"), *limits))
    packed = random_tokens([300] * 4, wild=False)
    far = torch.tensor([0.0, 30.0, 65.0, 200.0]).repeat_interleave(300) / 270  # the last weight is infinite
    work = Work(Tokens(packed.segments, packed.behavior + far, packed.behavior), torch.zeros(1200))
    work = replace(work, layout=Layout.of(correction))
    expected, got = (each(correction).apply(work).measured for each in (Eager, Loops))
    assert expected.highest[2].isinf() == (not limits)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_log_ratios_are_there_when_asked_for():
    packed = random_tokens([700, 0, 900, 3], torch.bfloat16)
    outcome = Loops(FULL).outcome(packed)
    assert "log_ratio" not in vars(outcome)
    again = replace(outcome, weights=outcome.keep)
    for found in (outcome, again):
        assert torch.equal(found.log_ratio, FULL(packed).log_ratio)


@pytest.mark.parametrize("plan", [None, Plan(keep=torch.tensor([True, False]))], ids=["all", "groups"])
def test_where_nothing_rejects_what_is_finite_is_kept(plan):
    packed = random_tokens([300, 200])
    outcome = Loops(CORRECTIONS["token_tis"]).outcome(packed, plan)
    assert (outcome.keep is outcome.finite) == (plan is None)
    assert outcome.finite[300:].any() and outcome.keep[300:].any() == (plan is None)


def test_loops_match_the_oracle():
    backend = Loops(FULL)
    for seed in range(200):
        packed, keep, weights = of_oracle(seed, torch.float32)
        got = backend.outcome(packed)
        assert torch.equal(got.keep, keep), seed
        # 1e-5: a log-ratio is rounded to float32, 4e-6 for log-probs of 50 nats, and the weight with it
        torch.testing.assert_close(got.weights.double(), weights, rtol=1e-5, atol=0)


def test_exponentials_are_exact_to_some_roundings():
    log_ratio = torch.cat([torch.linspace(-110, 88.7, 40001), torch.logspace(-30, 0, 999), torch.zeros(1)])
    nothing = torch.zeros_like(log_ratio)
    tokens = Tokens(Segments.whole([len(nothing)], nothing == 0), log_ratio, nothing)
    got = Loops(Correction(steps=(Reweight("token"),))).outcome(tokens).weights
    # 3e-7: some roundings of float32; 1e-44: its smallest subnormals
    torch.testing.assert_close(got.double(), log_ratio.double().exp(), rtol=3e-7, atol=1e-44)


@pytest.mark.parametrize(
    "log_ratio",
    [
        torch.logspace(-30, -1, 4000),
        *(pytest.param(torch.linspace(*x, 4000), marks=pytest.mark.slow) for x in ((0.3, 5), (-5, -0.3))),
    ],
    ids=["near 0", "above", "below"],
)
def test_what_is_1_less_loses_nothing(log_ratio):
    nothing = torch.zeros_like(log_ratio)
    tokens = Tokens(Segments.whole([4000], nothing == 0), log_ratio, nothing)
    layout = Layout.of(FULL, curves=False)
    measured = Loops(FULL).apply(Work(tokens, nothing, layout=layout)).measured
    excess = measured.sums[layout.names.index("excess")]
    torch.testing.assert_close(excess, log_ratio.double().expm1().sum(), rtol=3e-7, atol=0)


@pytest.mark.slow
def test_ratios_far_from_1_are_those_of_the_eager_path():
    log_ratio = torch.cat([torch.linspace(-120, 120, 4001), torch.tensor([-1e30, 88.72, 88.73, 1e30])])
    nothing = torch.zeros_like(log_ratio)
    tokens = Tokens(Segments.whole([len(nothing)], nothing == 0), log_ratio, nothing)
    got, expected = (
        each.apply(Work(tokens, nothing)).channel[0] for each in (each(FULL) for each in (Loops, Eager))
    )
    assert got.isinf().any()
    torch.testing.assert_close(got, expected, rtol=3e-7, atol=2**-24)  # 1 is added to what is rounded


def test_every_bin_counts_what_the_eager_path_counts_in_it():
    """The ends of the histogram, 0 of both signs, and probabilities that no batch above has."""
    edges = torch.tensor([2.0**-20, 2.0**7])
    sizes = torch.cat([edges, edges.nextafter(torch.zeros(2)), torch.tensor([0.0, 1e-30, 1.03, 200.0])])
    log_ratio = torch.cat([sizes, -sizes]).repeat(100)
    behavior = -torch.linspace(0, 20, 1600).float()
    behavior[800:] = behavior[800:].flip(0)  # blocks of likely tokens, blocks of unlikely ones
    tokens = Tokens(Segments.whole([1600], behavior < 1), behavior + log_ratio, behavior)
    exact = Tokens(tokens.segments, log_ratio, torch.zeros(1600))
    layout = Layout.of(FULL)
    for given in (tokens, exact):
        got, expected = (
            each(FULL).apply(Work(given, torch.zeros(1600), layout=layout)).measured.sums
            for each in (Loops, Eager)
        )
        bins = slice(len(layout.names), len(layout.names) + BINS)
        assert torch.equal(got[bins], expected[bins])
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("lengths", [[], [1], [5], [SMALLEST - 1]], ids=str)
def test_small_batches_build_nothing(lengths, monkeypatch):
    monkeypatch.setattr(loops, "SMALLEST", SMALLEST)
    backend = Loops(CORRECTIONS["seq_mis"])
    packed = random_tokens(lengths, wild=False)
    assert torch.equal(backend.outcome(packed).weights, CORRECTIONS["seq_mis"](packed).weights)
    assert not backend._built


def test_nothing_at_all():
    assert Loops(FULL).outcome(random_tokens([])).weights.shape == (0,)


def test_float64_stays_eager():
    packed = random_tokens([90, 40], torch.float64)
    assert Loops(FULL).outcome(packed).weights.dtype is torch.float64


def test_a_target_in_float64_stays_eager():
    packed = random_tokens([900])
    packed = replace(packed, target=packed.proximal.double())
    for numerator, dtype in (("target", torch.float64), ("proximal", torch.float32)):
        correction = Correction(numerator, steps=(Reweight("token"),))
        assert Loops(correction).outcome(packed).weights.dtype is dtype


def test_the_same_bits_twice_and_from_two_threads():
    packed = random_tokens([131072], noise=2e-3)
    work = Work(packed, torch.ones(131072), layout=Layout.of(FULL))
    backend = Loops(FULL)
    found = [backend.apply(work)]
    threads = [threading.Thread(target=lambda: found.append(backend.apply(work))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    for applied in found[1:]:
        assert torch.equal(applied.loss, found[0].loss)
        assert all(map(torch.equal, applied.measured, found[0].measured))


@pytest.mark.slow
def test_sixteen_lanes_decide_as_eight(monkeypatch):
    """What a processor with AVX-512 would run, here in two halves."""

    def wider(text):
        return built.library(text.replace("#ifdef __AVX512F__", "#if 1", 1))

    monkeypatch.setattr(loops, "_library", wider)
    agree(FULL, random_tokens([700, 0, 900, 3], noise=2e-3), observe=True)
    assert_applied_alike(Loops(FULL), random_tokens([900, 40, 300], noise=2e-3), None, 1e-6)


def test_what_was_built_once_is_loaded_again(monkeypatch, tmp_path):
    monkeypatch.setattr(built, "cache_folder", lambda: tmp_path)
    text = 'extern "C" int answer() { return 42; }'
    assert built.library(text).answer() == 42
    monkeypatch.setattr(built, "_build", lambda *_: pytest.fail("built twice"))
    assert built.library(text).answer() == 42
    assert len(list(tmp_path.iterdir())) == 1


def test_what_cannot_be_loaded_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(built, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(built, "_build", lambda found, text, path: path.write_text("no library"))
    with pytest.raises(built.BuildError, match=r"slime_ext\.backend: expected a library in .*so, got"):
        built.library("")


@pytest.mark.parametrize("cache", ["file", "nowhere"])
def test_without_a_cache_folder_one_of_this_process_serves(cache, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file") if cache == "file" else "/proc/nowhere")
    assert built.cache_folder.__wrapped__().is_dir()


def test_a_compiler_that_fails_is_named_and_eager_goes_on(monkeypatch, tmp_path):
    monkeypatch.setattr(built, "cache_folder", lambda: tmp_path)
    with pytest.raises(built.BuildError, match=r"slime_ext\.backend: expected .* to build, got .*error"):
        built.library("this is no C++")
    monkeypatch.undo()
    monkeypatch.setattr(loops, "library", lambda _: (_ for _ in ()).throw(built.BuildError("no luck")))
    packed = random_tokens([SMALLEST])
    backend = Loops(FULL)
    with pytest.warns(RuntimeWarning, match="no luck; this correction stays eager"):
        assert torch.equal(backend.outcome(packed).weights, FULL(packed).weights)


@pytest.mark.parametrize("level", ["sequence", pytest.param("token", marks=pytest.mark.slow)])
@pytest.mark.parametrize("aged", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_piece_may_begin_anywhere(level, aged):
    """However a piece lies among vectors, wherever it begins in its response: bins of position, of age and of
    probability hold what the eager path counts there, each with its sequence's weight and age."""
    correction = Correction(steps=(Reweight(level), Truncate(1.2)))
    lengths, count = (300, 400, 90), 0
    for before in (1, 5, 8, 16, 21):
        for start in (0, 3, 5, 8, 16, 21, 60, 64, 77):
            pieces = ((0, 300 - before, 300, 1), (1, start, start + 300, 0), (2, 1, 90, 1))
            whole = random_tokens(lengths, seed=count)
            held = torch.cat([torch.arange(s, e) + sum(lengths[:i]) for i, s, e, _ in pieces])
            segments = Segments(lengths, pieces, whole.segments.full_mask, 2, lambda values: values * 1)
            ages = torch.tensor([2.0, torch.nan, 9.0]) if aged else None
            mine = Tokens(segments, whole.proximal[held], whole.behavior[held], ages=ages)
            work = Work(mine, torch.zeros(len(held)), layout=Layout.of(correction))
            expected, got = (served(correction).apply(work).measured for served in (Eager, Loops))
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
            count += 1
    assert count == 45


@pytest.mark.slow
def test_short_sequences_of_many_ages_do_not_run_together():
    """More than a block of them, and of every length about that of a vector."""
    for level in ("sequence", "token"):
        correction = Correction(steps=(Reweight(level), Truncate(1.2)))
        packed = random_tokens([*range(1, 70), *range(40, 0, -3)] * 2, wild=False)
        ages = torch.arange(packed.segments.count).remainder(11).float()
        packed = replace(packed, ages=torch.where(ages == 10, torch.nan, ages))
        work = Work(packed, torch.zeros(packed.segments.size), layout=Layout.of(correction))
        expected, got = (served(correction).apply(work).measured for served in (Eager, Loops))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_sequences_without_tokens_have_no_largest_weight():
    correction = Correction(steps=(Reweight("sequence"), Truncate(1.2)))
    for curves in (False, True):
        layout = Layout.of(correction, curves=curves)
        work = Work(random_tokens([0, 0]), torch.zeros(0), layout=layout)
        expected, got = (served(correction).apply(work).measured for served in (Eager, Loops))
        torch.testing.assert_close(got, expected)


@pytest.mark.slow
def test_the_bins_of_short_sequences_lose_no_digits():
    """Each lane of a bin takes thousands of them: in float32 throughout their sum would be off by 1e-5."""
    correction = Correction(steps=(Reweight("token"), Truncate(1.05)))
    count = 40 * 6000
    segments = Segments.whole([40] * 6000, torch.ones(count, dtype=torch.bool))
    packed = Tokens(segments, torch.full((count,), -0.2), torch.full((count,), -0.3))
    layout = Layout.of(correction)
    sums = Loops(correction).apply(Work(packed, torch.zeros(count), layout=layout)).measured.sums
    by_position = sums[-len(CURVES) * CURVE_BINS * len(CURVE_COLUMNS) :][: 2 * len(CURVE_COLUMNS)].view(2, -1)
    excess = (torch.tensor(-0.2) - torch.tensor(-0.3)).double().expm1().item()
    for found, share in zip(by_position.tolist(), (16, 24), strict=True):
        assert found[:4] == pytest.approx([share * 6000 * x for x in (1, 1, excess, 1.05)], rel=1e-6)
