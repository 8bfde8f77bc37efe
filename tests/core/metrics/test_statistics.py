"""Accumulated statistics against the oracle: independent of micro-batches, robust to broken tokens."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from dataclasses import dataclass, replace

import pytest
import torch

from slime_ext import presets
from slime_ext.core.correction import Correction, HookInputs, Plan, Tokens, apply
from slime_ext.core.metrics import layout, names
from slime_ext.core.metrics import measure as module
from slime_ext.core.metrics.layout import MetricsLayout
from slime_ext.core.metrics.measure import measure
from slime_ext.core.metrics.totals import reduce
from slime_ext.core.state import Effect, Step
from slime_ext.core.steps import Reject, Reweight, Truncate
from slime_ext.core.terms import ReverseK3, SquaredLogRatio
from slime_ext.ops.segments import Segments
from tests import oracle
from tests.batches import tokens

NAMES = ("metrics_only", "token_tis", "seq_is_rs", "geo_rs", "trm", "turn_tis", "off_policy_is", "icepop")


def totals_of(correction, packed, outcome=None, *, curves=True, **more):
    """The totals of one micro-batch."""
    layout = MetricsLayout.of(correction, curves=curves)
    outcome = correction(packed, observe=True) if outcome is None else outcome
    return reduce(layout, measure(packed, outcome, layout, **more))[0]


def numbers_of(*args, **more):
    """Every metric of one micro-batch, curves too."""
    totals = totals_of(*args, **more)
    return names.scalars(totals) | names.curves(totals)


def accumulated(correction, batch, size=100, *, ages=None, age_steps=None, curves=True):
    """The totals of a batch, ``size`` sequences per micro-batch."""
    layout = MetricsLayout.of(correction, curves=curves)
    found = []
    for i in range(0, len(batch), size):
        packed, _ = tokens(batch[i : i + size])
        if ages is not None:
            packed = replace(packed, ages=torch.tensor(ages[i : i + size], dtype=torch.float64))
        if age_steps is not None:
            packed = replace(packed, age_steps=torch.tensor(age_steps[i : i + size], dtype=torch.float64))
        found.append(measure(packed, correction(packed, observe=True), layout))
    return reduce(layout, functools.reduce(operator.add, found) if found else None)[0]


def scalars(*args, **kwargs):
    """The same with curves, for which every token is looked up, and without."""
    found, other = (names.scalars(accumulated(*args, **kwargs, curves=on)) for on in (True, False))
    assert other == pytest.approx(found, rel=1e-12, abs=1e-15, nan_ok=True)
    return {name.removeprefix("off_policy/"): value for name, value in found.items()}


def one_long(values, mask=None):
    """A batch of one sequence with these log-ratios."""
    n = len(values)
    zeros = dict.fromkeys(("target", "advantage", "host_loss"), [0.0] * n)
    return [{"proximal": list(values), "behavior": [0.0] * n, "mask": mask or [1] * n, **zeros}]


def bin_of(curve, value, edges):
    return layout.CURVES[curve][sum(value >= edge for edge in edges)]


@pytest.mark.parametrize("counters", [4, 9 * 16, module.COUNTERS])
def test_bins_are_counted_alike_where_bincount_would_wait(monkeypatch, counters):
    monkeypatch.setattr(module, "COUNTERS", counters)
    generator = torch.Generator().manual_seed(0)
    for size in (0, 1, 15, 16, 17, 1000):
        index = torch.randint(0, 7, (size,), generator=generator, dtype=torch.int32)
        rows = (torch.ones(size), torch.randn(size, generator=generator))
        sums = module._sums_by_bin(index, rows, 9)
        torch.testing.assert_close(sums, module._scattered(index.long(), rows, 9), rtol=1e-12, atol=1e-12)
        counts = module._counts_by_bin(index, 9).tolist()
        assert sums[0].tolist() == counts == [index.tolist().count(i) for i in range(9)]


PLACES = {
    "by_position": lambda s, t: bin_of("by_position", t, layout.POSITIONS),
    "by_staleness": lambda s, t: bin_of("by_staleness", s["age"], layout.AGES),
    "by_probability": lambda s, t: bin_of("by_probability", math.exp(s["behavior"][t]), layout.PROBABILITIES),
}


@pytest.mark.parametrize("name", NAMES)
def test_scalars_match_the_oracle(name):
    correction = presets.get(name)
    for seed in range(20):
        batch = oracle.random_batch(seed)
        expected = oracle.correct(oracle.SPECS[name], batch)
        weights, keep = ([s[key] for s in expected] for key in ("weights", "keep"))
        wanted = oracle.metrics(batch, weights, keep, correction.numerator)
        got = scalars(correction, batch)
        for key, value in wanted.items():
            assert got[key] == pytest.approx(value, rel=1e-10, abs=1e-12), (seed, key)


def test_tokens_that_differ_in_a_bit_are_counted():
    """One bit, at large and at small log-probs; masked tokens and those without a log-prob do not count."""
    proximal = torch.tensor([-3.0, -1.5, -2e-7, -0.0, 0.0, -7.0, -1.0, -1.0, torch.nan])
    behavior = proximal.clone()
    behavior[3] = 0.0
    for i in (0, 2, 6):
        behavior[i] = torch.nextafter(proximal[i], torch.tensor(0.0))
    behavior[7] = torch.nan
    segments = Segments.whole([4, 5], torch.tensor([1, 1, 1, 1, 1, 1, 0, 1, 0]))
    packed = Tokens(segments, proximal, behavior, target=proximal, advantages=None)
    for exact, share in ((False, 2 / 6), (True, 0.0)):
        one = replace(packed, behavior=torch.where(behavior.isnan(), behavior, proximal)) if exact else packed
        correction = presets.get("token_tis")
        plan = MetricsLayout.of(correction, differing=True)
        measured = measure(one, correction(one, observe=True), plan)
        found = names.scalars(reduce(plan, measured)[0])
        assert found["off_policy/differing_fraction"] == share
        assert found["off_policy/log_ratio_max"] == (0.0 if exact else 2.0**-22)


@pytest.mark.parametrize("name", ["token_tis", "geo_rs"])
def test_curves_match_the_oracle(name):
    correction = presets.get(name)
    for seed in range(30):
        batch = oracle.random_batch(seed)
        ages = [(7 * i + seed) % 5 for i in range(len(batch))]
        expected = oracle.correct(oracle.SPECS[name], batch)
        weights, keep = ([s[key] for s in expected] for key in ("weights", "keep"))
        for s, age in zip(batch, ages, strict=True):
            s["age"] = age
        got = names.curves(accumulated(correction, batch, ages=ages))
        wanted = {}
        for curve, of in PLACES.items():
            rows = oracle.curve(batch, weights, keep, of)
            total = sum(row[0] for row in rows.values())
            for label, (n, *values) in rows.items():
                prefix = f"off_policy/{curve}/{label}/"
                columns = ("share", "k3_kl", "ratio_mean", "weight_mean", "kept_fraction")
                wanted |= {prefix + c: v for c, v in zip(columns, [n / total, *values], strict=True)}
        assert got == pytest.approx(wanted, rel=1e-10, abs=1e-12), seed


def test_steps_are_counted_one_by_one():
    steps = (
        Reject("token", "ratio", high=2.0),
        Reweight("token"),
        Truncate(1.5),
        Reject("sequence", "k2", high=0.1),
    )
    got = scalars(Correction(steps=steps), one_long([1.0, 0.5, 0.1, 0.0]))
    expected = {
        "steps/0_reject/rejected_fraction": 0.25,
        "steps/0_reject/kept_fraction": 0.75,
        "steps/2_truncate/clipped_fraction": 0.5,  # also where the token is rejected
        "steps/3_reject/rejected_fraction": 1.0,
        "steps/3_reject/kept_fraction": 0.0,
    }
    assert {k: v for k, v in got.items() if k.startswith("steps/")} == expected
    assert got["rejected_sequence_fraction"] == 1 and got["clipped_fraction"] == 0.5


def test_a_clipped_sequence_counts_its_response_tokens():
    batch = one_long([1.0] * 4, mask=[1, 0, 1, 0])  # those of a tool carry the sequence's weight, too
    found = scalars(Correction(steps=(Reweight("sequence"), Truncate(2.0))), batch)
    assert found["tokens"] == 2
    assert found["clipped_fraction"] == found["steps/1_truncate/clipped_fraction"] == 1


def test_a_non_finite_log_prob_is_lost_before_the_first_step():
    batch = one_long([0.0] * 4)
    batch[0]["behavior"][1] = math.nan
    got = scalars(Correction(steps=(Reject("sequence", "ratio", high=2.0),)), batch)
    assert got["steps/0_reject/rejected_fraction"] == 0 and got["steps/0_reject/kept_fraction"] == 0
    assert got["nonfinite_fraction"] == 0.25 and got["kept_fraction"] == 0


@pytest.mark.parametrize("name", ["token_tis", "seq_is_rs"])
def test_micro_batches_add_up(name):
    batch = oracle.random_batch(7)
    whole, parts = scalars(presets.get(name), batch), scalars(presets.get(name), batch, 1)
    assert parts == pytest.approx(whole, rel=1e-12)


def test_ranks_add_up():
    correction = presets.get("geo_rs")
    plan, vectors = MetricsLayout.of(correction), []
    for seed in (1, 2):
        packed, _ = tokens(oracle.random_batch(seed))
        measured = measure(packed, correction(packed, observe=True), plan)
        vectors.append(measured)
    seen = []
    reduce(plan, vectors[1], lambda x: (seen.append(x.clone()), x)[1], rank=1, size=2)
    merged, extra = reduce(plan, vectors[0], lambda x: x + seen[0], rank=0, size=2, extra=torch.ones(0))
    whole = accumulated(correction, oracle.random_batch(1) + oracle.random_batch(2))
    assert names.scalars(merged) == pytest.approx(names.scalars(whole), rel=1e-12) and len(extra) == 2


@pytest.mark.parametrize("left_out", ["none", "masked", "without a log-prob"])
def test_quantiles_are_within_their_bound(left_out):
    """Tokens that do not count are left out, of which the histogram has all in the bin around 0."""
    torch.manual_seed(0)
    log_ratio = torch.randn(5000, dtype=torch.float64) * 0.3 + 0.2
    (batch,) = one_long(log_ratio.tolist(), [int(i % 3 > 0 or left_out != "masked") for i in range(5000)])
    if left_out == "without a log-prob":
        batch["behavior"] = [0.0 if i % 3 else math.nan for i in range(5000)]
    counted = log_ratio if left_out == "none" else log_ratio[torch.arange(5000) % 3 > 0]
    got = scalars(Correction(), [batch])
    for percent in (1, 10, 50, 90, 99):
        exact = counted.sort().values[math.ceil(percent * len(counted) / 100) - 1].item()
        assert math.log(got[f"ratio_p{percent:02d}"]) == pytest.approx(exact, rel=0.0308)


def test_float32_log_probs_give_the_metrics_of_the_same_numbers_in_float64():
    """Blocks of 32 are added in float32."""
    torch.manual_seed(0)
    correction, found = presets.get("token_tis"), []
    behavior = -torch.rand(20000)
    proximal = behavior + torch.randn(20000) * 0.02
    for dtype in (torch.float32, torch.float64):
        segments = Segments.whole([15000, 5000], torch.ones(20000, dtype=torch.bool))
        found.append(numbers_of(correction, Tokens(segments, proximal.to(dtype), behavior.to(dtype))))
    assert found[0] == pytest.approx(found[1], rel=1e-5, abs=1e-6)


def test_curves_of_float32_are_added_in_float64():
    torch.manual_seed(0)
    behavior = -torch.rand(200_000)
    packed = Tokens(Segments.whole([200_000], torch.ones(200_000)), behavior + 0.003, behavior)
    totals = totals_of(presets.get("token_tis"), packed)
    excess = (packed.proximal - behavior).expm1().double()
    assert sum(row["ratio_minus_one"] for row in totals.curves["by_position"].values()) == pytest.approx(
        excess.sum().item(), rel=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bins_begin_at_their_edges(dtype):
    edges = torch.tensor(layout.LOG_PROBABILITIES, dtype=dtype)
    far = torch.tensor([-torch.inf] * len(edges), dtype=dtype)
    log_probs = torch.cat([edges, edges.nextafter(far), edges.nextafter(-far), -edges, far[:1]])
    expected = (log_probs >= edges[:, None]).sum(0)
    assert module._bins(log_probs, layout.LOG_PROBABILITIES).tolist() == expected.tolist()
    lengths = [layout.POSITIONS[-1] + 5, 0, 70]
    expected = [sum(at >= edge for edge in layout.POSITIONS) for n in lengths for at in range(n)]
    assert module.position_bins(Segments.whole(lengths, torch.ones(sum(lengths)))).tolist() == expected
    part = Segments((80, 300), ((0, 10, 70, 1), (1, 250, 260, 0)), torch.ones(380, dtype=torch.bool), 2)
    expected = [sum(at >= edge for edge in layout.POSITIONS) for at in (*range(10, 70), *range(250, 260))]
    assert module.position_bins(part).tolist() == expected


@pytest.mark.parametrize("correction", [Correction(), presets.get("seq_is_rs")])
def test_nothing_is_all_zero(correction):
    for batch in ([], one_long([]), one_long([1.0], mask=[0])):
        assert set(scalars(correction, batch).values()) <= {0.0}


def test_a_ratio_beyond_all_others_leaves_one_sample():
    got = scalars(Correction(), one_long([0.0, 400.0]))
    assert got["ess_ratio"] == 0.5 and got["ratio_max"] == math.exp(400) and got["k3_kl"] > 1e100


def test_of_large_equal_weights_all_are_left():
    """Whose squares add up to more than float32 holds."""
    length = 40_000
    behavior = torch.full((length,), -2.0)
    packed = Tokens(Segments.whole([length], torch.ones(length)), behavior + 0.001, behavior)
    found = numbers_of(Correction(steps=(Reweight("sequence"),)), packed)
    assert (
        found["off_policy/ess_weight"] == pytest.approx(1, rel=1e-6) and found["off_policy/ess_weight"] <= 1
    )


@pytest.mark.parametrize("level", [-6.0, -8.0, -10.0, -12.0, -20.0])
def test_of_tiny_ratios_the_sample_size_stays_a_fraction(level):
    draw = torch.Generator().manual_seed(0)
    behavior = torch.full((1000,), -0.5)
    proximal = behavior + level + 0.1 * torch.randn(1000, generator=draw)
    packed = Tokens(Segments.whole([1000], torch.ones(1000)), proximal, behavior)
    assert 1e-3 <= numbers_of(Correction(), packed)["off_policy/ess_ratio"] <= 1


def test_a_nonfinite_log_ratio_is_counted_without_an_index_out_of_range():
    """On CUDA it is named when the step is reduced; until then the hook must go on."""
    assert scalars(Correction(), one_long([0.0, math.nan, math.inf]))["tokens"] == 3


def test_log_ratios_beyond_the_exponential_stay_numbers_in_log_space():
    got = scalars(Correction(), one_long([500.0, 500.0]) + one_long([0.0]))
    assert got["log1p_chi2_sequence"] == pytest.approx(2000 - math.log(2))
    assert got["ess_sequence"] == 0.5 and math.isinf(got["chi2_sequence"])


def test_ages_are_counted_by_sample():
    batch = [s for x in (0.1, 0.2, 0.3) for s in one_long([x])]
    got = scalars(Correction(), batch, ages=[3.0, math.nan, 1.0])
    assert (got["staleness_mean"], got["staleness_max"]) == (2, 3)
    assert got["staleness_known_fraction"] == pytest.approx(2 / 3)
    assert not [name for name in got if "staleness_steps" in name]
    got = scalars(Correction(), batch, ages=[0.0, 0.0, 0.0], age_steps=[12.0, math.nan, 4.0])
    assert (got["staleness_mean"], got["staleness_steps_mean"], got["staleness_steps_max"]) == (0, 8, 12)


def test_only_the_first_of_the_ranks_that_share_sequences_counts_them():
    packed, _ = tokens(oracle.random_batch(5))
    assert totals_of(presets.get("seq_is_rs"), packed, counts_sequences=False)["sequences"] == 0


@pytest.mark.parametrize("curves", [False, True])
def test_the_same_bits_twice(curves):
    generator = torch.Generator().manual_seed(0)
    behavior = -torch.rand(70_000, generator=generator)
    proximal = behavior + torch.randn(70_000, generator=generator) * 0.02
    packed = Tokens(Segments.whole([69_000, 1000], torch.ones(70_000, dtype=torch.bool)), proximal, behavior)
    correction = presets.get("decoupled_geo_rs_seq_tis")
    plan = MetricsLayout.of(correction, curves=curves)
    one, other = (measure(packed, correction(packed, observe=True), plan) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_masked_token_is_no_extreme():
    below, above = (scalars(Correction(), one_long([x, 2 * x, 0.0], mask=[1, 1, 0])) for x in (-0.5, 0.5))
    assert below["ratio_max"] == pytest.approx(math.exp(-0.5))
    assert above["ratio_min"] == pytest.approx(math.exp(0.5))


@pytest.mark.parametrize("value", [-1e30, 1e30, 100.0])
def test_k3_and_every_mean_stay_finite_and_of_their_sign(value):
    packed, _ = tokens(one_long([0.0, value]), torch.float32)
    found = numbers_of(Correction(), packed)
    means = {name: found[name] for name in found if name.endswith(("k3_kl", "ratio_mean", "chi2_token"))}
    assert all(math.isfinite(x) for x in means.values()) and found["off_policy/k3_kl"] > 0
    assert all(x >= 0 for name, x in means.items() if name.endswith("k3_kl"))


def test_a_terms_metric_is_its_mean_over_response_tokens_whatever_the_micro_batches():
    """Against plain floats: c l^2 and c (e^-l - 1 + l), 0 where the behavior log-prob is not finite."""
    terms = SquaredLogRatio(0.5), ReverseK3(2.0)
    correction = Correction("target", steps=(Reject(low=0.9, high=1.1),), terms=terms)
    for seed, size in itertools.product(range(20), (1, 2, 100)):
        batch = oracle.random_batch(seed, wild=False)
        found, shape = [], MetricsLayout.of(correction)
        for i in range(0, len(batch), size):
            packed, host_loss = tokens(batch[i : i + size])
            found.append(apply(correction, HookInputs(packed, host_loss, layout=shape)).measured)
        got = names.scalars(reduce(shape, functools.reduce(operator.add, found))[0])
        rows = [zip(s["target"], s["behavior"], s["mask"], strict=True) for s in batch]
        logs = [t - b for row in rows for t, b, m in row if m]
        for name, of in (("0_squared_log_ratio", squared), ("1_reverse_k3", reverse_k3)):
            mean = math.fsum(of(x) for x in logs if math.isfinite(x)) / max(len(logs), 1)
            assert got[f"off_policy/terms/{name}/mean"] == pytest.approx(mean, rel=1e-9, abs=1e-15), seed


def squared(x):
    return 0.5 * x * x


def reverse_k3(x):
    return 2.0 * (math.exp(-max(x, -20.0)) - 1 + max(x, -20.0))


TWO_UNITS = (Reweight("token"), Reject("token", high=2.0), Reject("sequence", "ratio", high=2.0))
OF_TURNS = (Reject("turn", "k2", "max", high=0.02), Reweight(), Truncate(1.5))
EFFECTS = {"turn": OF_TURNS, "two units": TWO_UNITS}
EFFECTS |= {"stale": (Reject(low=0.5, max_staleness=2), Reweight("sequence"), Truncate(1.1))}


@dataclass(frozen=True)
class OfUnit(Step):
    """Only says that it works on a unit."""

    unit: str = "token"

    def __call__(self, state, inputs):
        return state


@pytest.mark.parametrize("name", EFFECTS)
def test_what_each_step_did_is_counted_token_by_token(name):
    """Against running one step more or less."""
    steps = EFFECTS[name]
    for seed in range(20):
        packed, _ = tokens(oracle.random_batch(seed))
        packed = replace(packed, ages=torch.arange(packed.segments.count).double())
        units = tuple(OfUnit(s.unit) for s in steps)  # of all steps
        totals = totals_of(Correction(steps=steps), packed)
        for i, named in enumerate(layout.step_names(Correction(steps=steps))):
            if Effect.REJECT in steps[i].effects:
                kept = Correction(steps=(*steps[: i + 1], *units))(packed).keep.sum()
                assert totals[f"steps/{named}/kept_fraction"] == kept, (seed, named)


def test_the_sample_size_of_ratios_below_1():
    ratios = [0.1, 0.2, 0.3]
    got = scalars(Correction(), one_long([math.log(x) for x in ratios]))
    assert got["ess_ratio"] == pytest.approx(oracle.ess(ratios))


def test_of_ratios_that_are_all_0_one_sample_is_left():
    assert scalars(Correction(), one_long([-2000.0] * 4))["ess_ratio"] == 0.25


@pytest.mark.parametrize("log_ratio", [-200.0, -1e-9, 0.0, 1e-9, 200.0])
def test_a_quantile_of_equal_ratios_is_that_ratio(log_ratio):
    got = scalars(Correction(), one_long([log_ratio] * 3))
    found = [got[f"ratio_p{q}"] for q in ("01", "10", "50", "90", "99")]
    assert found == pytest.approx([math.exp(log_ratio)] * 5, rel=1e-12)


@pytest.mark.parametrize("log_ratios", [[-9.0, 0.0, 0.0, 9.0], [0.0, 0.0, 9.0, 9.0]])
def test_half_of_the_tokens_on_policy_have_a_median_of_1(log_ratios):
    assert scalars(Correction(), one_long(log_ratios))["ratio_p50"] == 1


@dataclass(frozen=True)
class BothBounds(Step):
    """Bounds weights from above, and then from below."""

    effects = frozenset({Effect.BOUND})

    def __call__(self, state, inputs):
        bounded = state.bound(state.weights.clamp(max=1.5))
        return bounded.bound(bounded.weights.clamp(min=0.6))


def test_each_step_counts_what_it_has_bounded_and_kept():
    """Of 5 ratios, Truncate bounds 2 and BothBounds 1 more; Reject keeps 4, of which one was bounded."""
    ratios = [1.0, 1.8, 3.0, 0.5, 0.9]
    for step, bounded in ((Truncate(1.5), 2), (BothBounds(), 3)):
        steps = (Reweight(), step, Reject("token", "ratio", high=2.0))
        got = scalars(Correction(steps=steps), one_long([math.log(x) for x in ratios]))
        found = {name.rpartition("/")[2]: x for name, x in got.items() if name.startswith("steps/")}
        assert found == {
            "clipped_fraction": bounded / 5,
            "rejected_fraction": pytest.approx(1 / 5),
            "kept_fraction": 4 / 5,
        }


def test_a_sequence_without_response_tokens_is_no_sample():
    batch = one_long([1.0]) + one_long([0.0]) + one_long([1.0], mask=[0])
    got = scalars(Correction(steps=(Reject("sequence", high=2.0),)), batch)
    assert (got["sequences"], got["rejected_sequence_fraction"]) == (2, 0.5)


@pytest.mark.parametrize("ages", [None, [math.nan, math.nan]])
def test_where_no_age_is_known_there_is_no_staleness(ages):
    totals = accumulated(Correction(), one_long([0.1]) + one_long([0.2]), ages=ages)
    values = {**names.scalars(totals), **names.curves(totals)}
    assert not [name for name in values if "staleness" in name]


def test_the_share_that_a_surrogate_clipped_is_of_all_response_tokens():
    packed, _ = tokens(one_long([0.0] * 4))
    found = numbers_of(Correction(), packed, surrogate_clipped=torch.arange(4) == 0)
    shares = [found[f"off_policy/{name}"] for name in ("surrogate_clipped_fraction", "clipped_fraction")]
    assert shares == [0.25, 0]


def test_what_its_group_takes_out_is_counted_beside_the_steps():
    packed, _ = tokens([s for x in (1.0, 0.0, 0.0, 0.0) for s in one_long([x])])
    correction = Correction(steps=(Reject(high=2.0),), group="atomic")
    outcome = correction(packed, Plan(keep=torch.tensor([False, False, True, True])), observe=True)
    found = numbers_of(correction, packed, outcome)
    shares = [found[f"off_policy/steps/{step}/rejected_fraction"] for step in ("0_reject", "group")]
    assert shares == [0.25, 0.5] and found["off_policy/kept_fraction"] == 0.5


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_measured_nothing_changes_nothing(rank):
    correction = presets.get("seq_is_rs")
    packed, _ = tokens(batch := oracle.random_batch(1))
    plan = MetricsLayout.of(correction)
    measured = measure(packed, correction(packed, observe=True), plan)
    sent = []
    reduce(plan, None, lambda x: (sent.append(x.clone()), x)[1], rank=1 - rank, size=2)
    merged, _ = reduce(plan, measured, lambda x: x + sent[0], rank=rank, size=2)
    assert names.scalars(merged) == names.scalars(accumulated(correction, batch))
