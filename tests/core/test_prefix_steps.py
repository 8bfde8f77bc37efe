"""Prefix steps, the cap from the effective sample size, bounds by sign, and terms against the oracle."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from slime_ext import correct
from slime_ext.core.correction import Correction, plan_step
from slime_ext.core.losses import Bounds, LossInputs, Reinforce
from slime_ext.core.needs import Need
from slime_ext.core.prefix_steps import PrefixBudget, PrefixReject, PrefixReweight
from slime_ext.core.steps import EssTruncate, Reject, Reweight, Truncate
from slime_ext.core.terms import FAR, ReverseK3, SquaredLogRatio
from slime_ext.ops.prefixes import prefix_sums, response_order, shard_sums
from slime_ext.ops.segments import Segments
from tests import oracle
from tests.batches import tokens

INF = math.inf


def rejects(kind, *fields, low=None, high, when="always", growth=None):
    """A rejection, as the package and as the oracle spell it. ``fields``: unit, statistic, aggregate."""
    more = {"growth": growth or "constant"} if kind is PrefixReject else {}
    ours = kind(*fields, low=low, high=high, when=when, **more)
    name = ("prefix_reject", *fields) if kind is PrefixReject else ("reject", *fields)
    return ours, (*name, -INF if low is None else low, high, *((growth or "",) if more else ()), when)


STEPS = {
    "product": (PrefixReweight(), ("prefix_reweight", "sum")),
    "geometric": (PrefixReweight("mean"), ("prefix_reweight", "mean")),
    "mean tv": rejects(PrefixReject, "tv", "mean", high=0.1),
    "sum k2, sqrt": rejects(PrefixReject, "k2", "sum", high=0.02, growth="sqrt"),
    "ratio, both": rejects(PrefixReject, "ratio", "sum", low=0.8, high=1.1, growth="sqrt", when="outward"),
    "signed k1": rejects(PrefixReject, "k1", "mean", low=-0.01, high=0.02, when="positive_advantage"),
    **{name: (PrefixBudget(*fields), ("prefix_budget", *fields)) for name, fields in {
        "budget": ("k3", 0.05, 0.001, 0.5, "always"), "flat": ("tv", 0.1, 0.01, 1.0, "outward")}.items()},
    **{f"{unit}, {when}": rejects(Reject, unit, "k2", "mean", high=0.001, when=when)
       for unit in ("token", "turn", "sequence")
       for when in ("positive_advantage", "outward_positive", "outward_negative")},
}  # fmt: skip


def column(values):
    return torch.tensor([x for s in values for x in s], dtype=torch.float64)


@pytest.mark.parametrize(
    ("step", "log_ratios", "keep"),
    [
        (PrefixReject("k1", "sum", low=-0.25, high=0.5), [-0.25, -0.25, -0.25], [1, 1, 0]),
        (PrefixReject("k1", "sum", low=-0.25, high=0.5), [0.25, 0.0, 0.25], [1, 1, 0]),
        (PrefixBudget("k2", high=0.5, budget=0.0, last=1.0, when="always"), [1.0, 0.0, 0.5], [1, 1, 0]),
    ],
)
def test_both_ends_of_a_bound_of_prefixes_are_inside(step, log_ratios, keep):
    zeros = dict.fromkeys(("behavior", "target", "advantage", "host_loss"), [0.0] * 3)
    packed, _ = tokens([{"proximal": log_ratios, "mask": [1] * 3, **zeros}])
    assert Correction(steps=(step,))(packed).keep.tolist() == keep


@pytest.mark.parametrize("length", [100, 16_384])
def test_equal_weights_have_a_sample_size_of_1_however_large_and_many(length):
    """The sequence's ratio is beyond float32 at 16,384 tokens, and then stands as its largest number."""
    behavior = torch.full((length,), -2.0)
    steps = {"steps": [{"reweight": {"level": "sequence"}}, "ess_truncate"]}
    loss, _, metrics = correct(torch.ones(length), behavior, behavior + 0.01, [length], steps)
    assert loss.tolist() == [1.0] * length and metrics["off_policy/kept_fraction"] == 1


@pytest.mark.parametrize("name", STEPS)
def test_matches_the_oracle(name):
    step, spec = STEPS[name]
    acted = 0
    for seed in range(30):
        batch = oracle.random_batch(seed)
        expected = oracle.correct(oracle.spec(spec), batch)
        outcome = Correction(steps=(step,))(tokens(batch)[0])
        assert outcome.keep.tolist() == [k for s in expected for k in s["keep"]], seed
        torch.testing.assert_close(
            outcome.weights, column(s["weights"] for s in expected), rtol=1e-11, atol=0
        )
        acted += (outcome.finite & ~outcome.keep).sum().item() + (outcome.weights > 1).sum().item()
    assert acted > 20


APART = {  # total variation of each token -> high, budget, last: where only one of two bounds decides
    "far itself, the budget far from spent": ([0.0] * 15 + [0.21 / 0.8], 0.2, 0.02, 0.8),
    "the same, and a token after it": ([0.0] * 20 + [0.1 / 0.5, 0.1], 0.1, 0.004, 0.5),
    "the budget is nearly spent at the end": ([0.06] * 30, 0.2, 0.05, 0.1),
    "nearly spent, with a smaller bound": ([0.0541] * 40, 0.1, 0.05, 0.1),
    "spent in the middle": ([0.052] * 60, 0.06, 0.05, 0.2),
    "a response of one token": ([0.21], 0.2, 0.02, 0.5),
}


@pytest.mark.parametrize("name", APART)
def test_each_bound_of_the_budget_acts_alone(name):
    far, *bounds = APART[name]
    s = {"behavior": [math.log(0.5)] * len(far), "proximal": [math.log(0.5 - x) for x in far]}
    s |= {key: [0.0] * len(far) for key in ("target", "advantage", "host_loss")} | {"mask": [1] * len(far)}
    (expected,) = oracle.correct(oracle.spec(("prefix_budget", "tv", *bounds, "always")), [s])
    step = PrefixBudget("tv", *bounds, "always")
    assert Correction(steps=(step,))(tokens([s])[0]).keep.tolist() == expected["keep"]


def test_what_is_not_finite_stays_in_its_sequence():
    segments = Segments.whole([3, 0, 4, 1], torch.tensor([1, 1, 1, 1, 0, 1, 1, 1]))
    values = torch.tensor([math.inf, 1.0, -1e300, 1.0, math.nan, 2.0, 1e-20, 5.0], dtype=torch.float64)
    sums = shard_sums(segments, segments.zeroed(values))
    found = prefix_sums(segments, values, sums)
    assert found[3:].tolist() == [1.0, 1.0, 3.0, 3.0 + 1e-20, 5.0] and found[0] == math.inf
    assert response_order(segments).tolist() == [1, 2, 3, 1, 1, 2, 3, 1]


def test_the_cap_is_the_effective_sample_size_of_the_whole_step():
    correction = Correction(steps=(Reweight(), EssTruncate()))
    batches = [tokens(oracle.random_batch(seed, wild=False)) for seed in range(4)]
    (number,) = plan_step(correction, [packed for packed, _ in batches]).numbers.values()
    weights = [
        w for packed, _ in batches for w in Correction(steps=(Reweight(),))(packed).weights.tolist() if w
    ]
    assert number.item() == pytest.approx(oracle.ess(weights), rel=1e-12) and number < 1


@pytest.mark.parametrize("weights", [(), (0.0, 0.0), (math.inf,), (1e300, 1.0)])
def test_the_cap_of_extreme_weights(weights):
    packed, _ = tokens(oracle.random_batch(0, wild=False))
    n = packed.segments.size
    state = Correction().read(packed).start
    given = torch.ones(n, dtype=torch.float64)
    given[: len(weights)] = torch.tensor(weights, dtype=torch.float64)
    state = type(state)(given if weights else 0 * given, state.keep)
    cap = EssTruncate().number_for_step([(state, Correction().read(packed))], lambda x: x)
    assert 0 < cap <= 1


def gradient(term, log_ratio, numbers=()):
    target = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    packed = SimpleNamespace(target=target, behavior=torch.zeros(1))
    inputs = LossInputs(packed, torch.ones(1, dtype=torch.bool))
    value = term(inputs, dict(numbers))
    return value.item(), torch.autograd.grad(value.sum(), target)[0].item()


def test_terms_pull_back_and_are_0_on_policy():
    for term in (SquaredLogRatio(0.5), ReverseK3(0.5)):
        assert gradient(term, 0.0) == (0, 0)
        assert gradient(term, 0.3)[1] > 0 > gradient(term, -0.3)[1]
    assert gradient(SquaredLogRatio(0.5), 0.3) == pytest.approx((0.045, 0.3))
    assert gradient(ReverseK3(0.5), 0.3) == pytest.approx(
        (0.5 * (math.exp(-0.3) - 1 + 0.3), 0.5 * (1 - math.exp(-0.3)))
    )
    value, slope = gradient(ReverseK3(), -500.0)
    assert value == pytest.approx(math.exp(FAR) - 1 - FAR) and slope == 0


def test_a_term_weighs_as_much_as_the_effective_sample_size_lacks():
    term, cap = (
        ReverseK3(2.0, times_one_minus_ess=True),
        {EssTruncate(): torch.tensor(0.75, dtype=torch.float64)},
    )
    assert gradient(term, 0.3, cap) == pytest.approx(gradient(ReverseK3(0.5), 0.3))


def test_a_term_is_added_to_the_hosts_loss_at_rejected_tokens_too():
    batch = oracle.random_batch(4)
    packed, host_loss = tokens(batch)
    steps = (Reweight(), Truncate(2.0), Reject("token", "tv", high=0.01))
    plain, pulled = Correction(steps=steps), Correction(steps=steps, terms=(SquaredLogRatio(0.1),))
    outcome = pulled(packed)
    loss, base = (c.loss(outcome, packed, host_loss, Bounds())[0] for c in (pulled, plain))
    log_ratio = torch.where(outcome.finite, packed.target - packed.behavior, 0)
    torch.testing.assert_close(loss - base, 0.1 * log_ratio.square())
    assert Need.TARGET in pulled.needs and (outcome.finite & ~outcome.keep).any()
    assert not Correction(terms=(SquaredLogRatio(),)).is_identity


def test_a_prefix_step_with_reinforce_weighs_each_token_by_what_led_to_it():
    packed, host_loss = tokens(oracle.random_batch(2, wild=False))
    correction = Correction("target", Reinforce(), (PrefixReweight(),))
    outcome = correction(packed)
    loss, _ = correction.loss(outcome, packed, host_loss, Bounds())
    (slope,) = torch.autograd.grad(loss.sum(), packed.target)
    kept = outcome.keep
    torch.testing.assert_close(slope[kept], -(outcome.weights * packed.advantages)[kept])
