"""Corrections beyond the presets: random stacks of steps against the oracle, combinations that are refused,
plans."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import slime_ext
from slime_ext import presets
from slime_ext.core.centering import Center
from slime_ext.core.correction import Correction, Plan, Tokens, largest_product, plan_step
from slime_ext.core.losses import SURROGATES, Bounds, DualClip, HostLoss, LossInputs, PpoClip, Reinforce, Sapo
from slime_ext.core.needs import Need
from slime_ext.core.prefix_steps import PrefixReweight
from slime_ext.core.scoped import ZeroOutside
from slime_ext.core.statistics import StatisticKey, tabulate
from slime_ext.core.steps import (
    Clip,
    MinPrefixReweight,
    Normalize,
    Reject,
    Reweight,
    SecondMoment,
    SignedClip,
    Truncate,
    Veto,
)
from slime_ext.core.terms import SquaredLogRatio
from slime_ext.errors import ConfigError
from slime_ext.ops.segments import Segments
from tests import oracle
from tests.batches import flat_call, tokens

INF = math.inf


def is_the_oracles(correction, spec, seed):
    batch = oracle.random_batch(seed)
    expected, outcome = oracle.correct(spec, batch), correction(tokens(batch)[0])
    assert outcome.keep.tolist() == [k for s in expected for k in s["keep"]], (seed, correction)
    weights = torch.tensor([w for s in expected for w in s["weights"]], dtype=torch.float64)
    assert torch.allclose(outcome.weights, weights, rtol=1e-11, atol=1e-12), (seed, correction)


COUPLED = [
    (
        (Reweight("token"), Truncate(2.0), Normalize()),
        (("reweight", "token"), ("truncate", 2.0), ("normalize", "token")),
    ),
    (
        (Reweight("sequence"), Truncate(2.0), Normalize("sequence")),
        (("reweight", "sequence"), ("truncate", 2.0), ("normalize", "sequence")),
    ),
    ((SecondMoment(0.001),), (("second_moment", 0.001),)),
    ((SecondMoment(1e-9),), (("second_moment", 1e-9),)),
]


@pytest.mark.parametrize(("steps", "theirs"), COUPLED)
def test_coupled_steps_match_the_oracle(steps, theirs):
    for seed in range(60):
        is_the_oracles(Correction(steps=steps), oracle.spec(*theirs), seed)


@pytest.mark.parametrize(("steps", "theirs"), COUPLED)
def test_a_plan_makes_micro_batches_equal_to_the_whole(steps, theirs):
    batch = [s for seed in range(4) for s in oracle.random_batch(seed)]
    whole = Correction(steps=steps)(tokens(batch)[0])
    parts = [tokens(batch[i : i + 3])[0] for i in range(0, len(batch), 3)]
    plan = plan_step(Correction(steps=steps), parts)
    outcomes = [Correction(steps=steps)(part, plan) for part in parts]
    assert torch.equal(torch.cat([o.keep for o in outcomes]), whole.keep)
    torch.testing.assert_close(torch.cat([o.weights for o in outcomes]), whole.weights, rtol=1e-13, atol=0)


def test_a_plan_scales_the_loss_and_rejects_sequences():
    packed = tokens(oracle.random_batch(2))[0]
    correction = Correction(steps=WEIGHTED, denominator="kept", group="atomic")
    sequences = torch.arange(packed.segments.count)
    plan = Plan(scale=1.0 + sequences.double(), keep=sequences % 2 == 0)
    alone, planned = correction(packed), correction(packed, plan)
    assert torch.equal(planned.keep, alone.keep & (packed.segments.ids % 2 == 0))
    host = torch.randn(packed.segments.size, dtype=torch.float64)
    loss, _ = correction.loss(planned, packed, host, Bounds(0.2, 0.2))
    expected = torch.where(planned.keep, host * alone.weights * (1 + packed.segments.ids), 0)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


WEIGHTED = (Reweight("token"), Truncate(2.0))


def test_a_coupled_step_comes_once():
    with pytest.raises(ConfigError, match=r"steps\[1\].second_moment: expected one such step, got a second"):
        Correction(steps=(SecondMoment(), SecondMoment()))


def test_what_every_step_did_is_told_apart():
    """Each veto rejects one more token; the group comes after the last step."""
    many = (*(Veto(0.5 * 0.9**i) for i in range(40)),)
    packed, _ = tokens(oracle.random_batch(0, wild=False))
    plan = Plan(keep=torch.zeros(packed.segments.count, dtype=torch.bool))
    effects = {e.step: e for e in Correction(steps=many, group="atomic")(packed, plan).step_records}
    assert not effects[len(many)].flags.any() and set(effects) == {-1, *range(len(many) + 1)}
    for place, step in enumerate(many):
        (alone,) = (e for e in Correction(steps=(step,))(packed).step_records if e.step == 0)
        assert torch.equal(effects[place].flags, alone.flags) and alone.unit == "sequence"


def test_what_a_correction_needs_from_the_host():
    own_loss = {Need.TARGET, Need.ADVANTAGES}
    needs = {
        Correction(steps=WEIGHTED): set(),
        Correction(surrogate=PpoClip()): own_loss,
        Correction(numerator="target"): {Need.TARGET},
        Correction(terms=(SquaredLogRatio(),)): {Need.TARGET},
        Correction("target", Reinforce(), WEIGHTED, center=Center()): own_loss | {Need.HEAD},
        Correction(steps=(SignedClip(),)): {Need.ADVANTAGES},
        Correction(steps=(Reject("token", "tv", high=0.1, when="outward"),)): {Need.ADVANTAGES},
        Correction(steps=(Reject("sequence", max_staleness=3),)): {Need.AGES},
        Correction(steps=(Reject("sequence", max_staleness_steps=3),)): {Need.AGE_STEPS},
        Correction(steps=(SecondMoment(),)): {Need.WHOLE_STEP},
        Correction(steps=(Veto(0.5),), group="atomic"): {Need.GROUPS},
        Correction(steps=(Veto(0.5),), denominator="kept"): {Need.KEPT_COUNT},
        Correction(steps=(Veto(0.5),), mask_scope="all"): {Need.MASKS},
    }
    assert {correction: set(correction.needs) for correction in needs} == needs


def test_corrections_print_compare_and_hash():
    one, other = (Correction(steps=WEIGHTED) for _ in range(2))
    assert (
        one == other and hash(one) == hash(other) and eval(repr(one)) == one and HostLoss() == one.surrogate
    )


@pytest.mark.parametrize("observe", [False, True])
def test_an_empty_batch_has_an_empty_outcome(observe):
    packed, _ = tokens([])
    for steps in (
        (Reweight("sequence"), Veto(0.1)),
        (MinPrefixReweight(),),
        (Reweight("turn"),),
        (SecondMoment(),),
    ):
        assert Correction(steps=steps)(packed, observe=observe).weights.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.bfloat16])
def test_narrow_advantages_are_added_in_float32(dtype):
    """100 times 1000 is beyond float16, 100 times -2 beyond a byte."""
    value = -2.0 if dtype is torch.int8 else -1000.0
    s = {k: [-1.0] * 100 for k in ("proximal", "target", "behavior", "advantage", "host_loss")}
    packed, _ = tokens([s | {"mask": [1] * 100}])
    packed = replace(packed, advantages=torch.full((100,), value).to(dtype))
    correction = Correction(steps=(Reject("sequence", high=2.0, when="negative_advantage"),))
    table = tabulate(correction.statistics, correction.read(packed))
    assert table[StatisticKey("sum", "sequence", "advantage")].tolist() == [100 * value]


@pytest.mark.parametrize("garbage", [math.nan, INF, -INF])
@pytest.mark.parametrize(
    "surrogate", [Reinforce(), PpoClip(), PpoClip(anchor="behavior"), DualClip(), Sapo()], ids=str
)
def test_masked_tokens_hold_anything_and_give_no_gradient(surrogate, garbage):
    found = []
    for masked in (0.0, garbage):
        s = {k: [-1.0, masked, -2.0] for k in ("proximal", "target", "advantage", "host_loss")}
        s |= {"mask": [1, 0, 1], "behavior": [-1.1, masked, -2.0], "target": [-1.05, masked, -2.05]}
        packed, host_loss = tokens([s])
        correction = Correction(surrogate=surrogate)
        loss, clipped = correction.loss(correction(packed), packed, host_loss, Bounds())
        with torch.autograd.set_detect_anomaly(True):  # no NaN on the way either
            loss.sum().backward()
        found.append([loss.tolist(), clipped.tolist(), packed.target.grad.tolist()])
    assert found[0] == found[1] and found[1][0][1] == found[1][2][1] == 0 and any(found[1][2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize(
    "surrogate", [PpoClip("behavior"), DualClip("behavior"), Sapo("behavior"), Reinforce()], ids=str
)
def test_a_ratio_that_overflows_gives_no_nan(surrogate, advantage, dtype):
    s = {"mask": [1, 1], "behavior": [-900.0, -1.0], "advantage": [advantage, 1.0], "host_loss": [0.0, 0.0]}
    packed, host_loss = tokens([s | {key: [-1.0, -1.1] for key in ("proximal", "target")}], dtype)
    for steps in ((), (Reject("token", high=2.0),), (Veto(1e-4, 100.0),)):
        correction = Correction(surrogate=surrogate, steps=steps)
        outcome = correction(packed)
        loss, clipped = correction.loss(outcome, packed, host_loss, Bounds())
        (gradient,) = torch.autograd.grad(loss.sum(), packed.target)
        assert not clipped[~outcome.keep].any() and loss.isfinite().all() and gradient.isfinite().all()
        assert gradient[outcome.keep].any() == bool(outcome.keep.any()) and not gradient[~outcome.keep].any()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_an_infinite_weight_on_a_loss_of_0_is_0(level):
    s = {k: [0.0, -1.0] for k in ("proximal", "target", "advantage", "host_loss")}
    host_loss = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
    call = flat_call([s | {"mask": [1, 1], "behavior": [-900.0, -1.0]}], loss=host_loss)
    loss, _, metrics = slime_ext.correct(**call, correction={"steps": [{"reweight": {"level": level}}]})
    (gradient,) = torch.autograd.grad((loss * torch.tensor([0.0, 1.0])).sum(), host_loss)
    assert metrics["off_policy/weight_max"] == INF and loss[0] == 0 and gradient[0] == 0
    assert not gradient.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_weight_that_nothing_bounds_gives_a_finite_loss(dtype):
    """Also summed over many tokens, and in the narrowest dtype that a host may take it to."""
    narrow = torch.bfloat16 if dtype is torch.float32 else dtype
    assert (torch.tensor(largest_product(dtype), dtype=torch.float64).to(narrow) * 8).isfinite()
    s = {k: [-1.0] * 100 for k in ("proximal", "target", "advantage", "host_loss")}
    wide = torch.float32 if dtype is torch.float16 else dtype
    host_loss = torch.full((100,), 2.0, dtype=wide, requires_grad=True)
    call = flat_call([s | {"mask": [1] * 100, "behavior": [-900.0] * 100}], loss=host_loss)
    loss, _, _ = slime_ext.correct(**call, correction={"steps": ["reweight"]})
    (gradient,) = torch.autograd.grad(loss.sum(), host_loss)
    assert loss.sum().isfinite() and loss.min() > 1e25 and gradient.isfinite().all() and gradient.all()


def test_a_capped_weight_on_the_far_loss_of_ppo_is_finite():
    correction = Correction(surrogate=PpoClip(), steps=(Reweight(), Truncate(5.0)))
    names = ("proximal", "behavior", "target", "advantages")
    far = map(torch.tensor, ([-800.0, -1.0], [-900.0, -1.0], [-0.1, -1.0], [-90.0, 1.0]))
    call = dict(zip(names, far, strict=True))
    loss, _, metrics = slime_ext.correct(torch.ones(2), lengths=[2], correction=correction, **call)
    assert metrics["off_policy/weight_mean"] == 3.0  # of 5 and 1
    assert loss.isfinite().all() and loss[0] > 1e28 and loss[1] == -1


def test_a_mean_weight_below_any_float32_divides():
    steps = (Reweight("sequence"), Truncate(2.0), Normalize())
    correction = Correction(steps=steps)
    length, count = 40, 10
    packed = Tokens(
        Segments.whole([length] * count, torch.ones(length * count, dtype=torch.bool)),
        torch.tensor([-2.79] * length + [-3.2] * length * (count - 1)),
        torch.full((length * count,), -0.2),
    )
    weights = correction(packed).weights
    expected = torch.tensor([10.0] * length + [0.0] * length * (count - 1))
    # e^-103.6 is a float32 of one bit or two.
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-4)


def with_log_ratios(units, length, dtype):
    """Sequences of ``length`` tokens whose log-ratios add up to these numbers."""
    log_ratios = torch.tensor(units, dtype=torch.float64).repeat_interleave(length) / length
    behavior = torch.where(log_ratios > 0, -log_ratios, 0) - 1.0
    segments = Segments.whole([length] * len(units), torch.ones(len(log_ratios)))
    advantages = torch.full_like(log_ratios, -1.0)
    columns = (values.to(dtype) for values in (behavior + log_ratios, behavior))
    return Tokens(segments, *columns, advantages=advantages.to(dtype))


FAR_BELOW = {  # logs of the weights of five sequences, in nats
    "beyond float32": [-119.4, -120.4, -118.4, -121.4, -120.0],
    "beyond float64": [-1119.4, -1120.4, -1118.4, -1121.4, -1120.0],
    "one of them": [-130.0, 0.5, -0.2, 0.1, -800.0],
    "beyond float32 above, and capped": [100.0, 0.5, -0.2, 90.0, -800.0],
}
INTO_WEIGHTS = {  # steps that make these logs into weights of at most 2
    "sequence": (1, (Reweight("sequence"), Truncate(2.0))),
    "turn": (8, (Reweight("turn"), Clip(0.0, 2.0))),
    "prefix": (1, (PrefixReweight(), Truncate(2.0))),
    "smallest prefix": (1, (MinPrefixReweight(), Truncate(2.0))),
    "by sign": (8, (SignedClip("sequence", negative_high=2.0),)),
    "zero outside": (1, (Reweight("sequence"), Truncate(2.0), ZeroOutside("sequence", low=0.0, high=1e30))),
    "two bounds": (8, (Reweight("sequence"), Truncate(3.0), Truncate(2.0))),
}


@pytest.mark.parametrize("steps", INTO_WEIGHTS)
@pytest.mark.parametrize("logs", FAR_BELOW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_that_no_number_holds_have_a_mean(logs, steps, dtype):
    length, steps = INTO_WEIGHTS[steps]
    logs = FAR_BELOW[logs]
    is_out = [isinstance(steps[-1], ZeroOutside) and x > math.log(1e30) for x in logs]
    capped = [-INF if out else min(x, math.log(2)) for x, out in zip(logs, is_out, strict=True)]
    relative = [oracle.exp(x - max(capped)) for x in capped]
    expected = [x / math.fsum(relative) * len(relative) for x in relative]
    packed = with_log_ratios(logs, length, dtype)
    found = Correction(steps=(*steps, Normalize("sequence")))(packed).weights
    # The log-ratios of float32 log-probs are rounded: of 1,120 nats by 6e-5.
    assert found[::length].tolist() == pytest.approx(expected, rel=2e-4 if dtype is torch.float32 else 1e-12)


def test_weights_of_0_have_no_mean():
    """Zeroed by a step, unlike those that are too small for their dtype."""
    packed = with_log_ratios([-119.0, -120.0], 1, torch.float32)
    zero = ZeroOutside("sequence", low=0.5, high=2.0)
    assert Correction(steps=(Reweight("sequence"), zero, Normalize()))(packed).weights.tolist() == [0.0, 0.0]
    packed = with_log_ratios([-119.0, 0.0], 1, torch.float32)
    assert Correction(steps=(Reweight("sequence"), zero, Normalize()))(packed).weights.tolist() == [0.0, 2.0]


def test_the_metrics_of_normalized_weights_that_underflowed():
    packed = with_log_ratios(FAR_BELOW["beyond float32"], 4, torch.float32)
    steps = {"steps": [{"reweight": {"level": "sequence"}}, "truncate", "normalize"]}
    loss, _, metrics = slime_ext.correct(torch.ones(20), packed.behavior, packed.proximal, [4] * 5, steps)
    assert loss.sum().item() == pytest.approx(20, rel=1e-5)
    weights = [math.exp(x + 118.4) for x in FAR_BELOW["beyond float32"]]
    assert metrics["off_policy/ess_weight"] == pytest.approx(oracle.ess(weights), rel=1e-4)


P3O = [  # log-ratios of single tokens; e^89 is beyond float32
    [90.0, 95.0, 0.0, -0.1],
    [100.0, 100.0, 0.0, 0.0],
    [700.0, 690.0, 300.0, 0.0],
    [-0.2, 0.1, 0.0, 0.3],
    [-110.0, -111.0, -109.5, -120.0],
    [900.0, 901.0, 0.0, 1.0],  # e^900 is beyond float64; a log-prob is above -1000
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_ratios", P3O, ids=str)
def test_p3o_tells_ratios_apart_that_no_number_holds(log_ratios, dtype):
    top = max(log_ratios)
    cap = oracle.ess([oracle.exp(x - top) for x in log_ratios])
    packed = with_log_ratios(log_ratios, 1, dtype)
    (number,) = plan_step(presets.get("p3o"), [packed]).numbers.values()
    assert number.item() == pytest.approx(cap, rel=2e-4 if dtype is torch.float32 else 1e-12)
    weights = presets.get("p3o")(packed).weights.tolist()
    assert weights == pytest.approx([min(oracle.exp(x), cap) for x in log_ratios], rel=2e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_own_losses_of_lower_precision_are_computed_in_float32(dtype):
    """In bfloat16 the product with the advantage alone would be off by 2^-8."""
    torch.manual_seed(0)
    rounded = {name: torch.randn(64).to(dtype) for name in ("target", "proximal", "behavior", "advantages")}
    exact = {name: values.double() for name, values in rounded.items()}
    valid = torch.ones(64, dtype=torch.bool)
    for surrogate in (kind() for kind in SURROGATES.values() if kind is not HostLoss):
        loss, clipped = surrogate(LossInputs(SimpleNamespace(**rounded), valid), Bounds())
        expected, also = surrogate(LossInputs(SimpleNamespace(**exact), valid), Bounds())
        torch.testing.assert_close(loss.double(), expected, rtol=2e-6, atol=2e-6)
        assert loss.dtype == torch.float32 and torch.equal(clipped, also), surrogate
