"""Divergences, log-ratios, summaries and surrogates against their definitions in floats."""

from __future__ import annotations

import math
import random

import pytest
import torch

from slime_ext import ops
from slime_ext.ops import surrogates
from slime_ext.ops.divergences import LARGEST_AT_TOKEN
from tests import oracle

NAN = math.nan

PAIRS = [(-0.1, -0.1), (-0.1, -3.0), (-7.0, -0.01), (-1e-9, -1e-9), (-40.0, -1.0), (-1.0, -40.0)]
PAIRS += [(-1e-9, -1.0), (-1.0, -1e-9)]


def column(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_divergences_of_the_ratio(name):
    p, q = map(list, zip(*PAIRS, strict=True))
    expected = [oracle.statistic(name, a, b) for a, b in PAIRS]
    torch.testing.assert_close(
        getattr(ops, name)(column(p) - column(q)), column(expected), rtol=1e-12, atol=1e-15
    )


@pytest.mark.parametrize("name", ["tv", "binary_kl", "binary_kl_max"])
def test_divergences_of_both_probabilities(name):
    p, q = map(list, zip(*PAIRS, strict=True))
    expected = [oracle.statistic(name, a, b) for a, b in PAIRS]
    torch.testing.assert_close(
        getattr(ops, name)(column(p), column(q)), column(expected), rtol=1e-9, atol=1e-15
    )


@pytest.mark.parametrize("name", ["binary_kl", "binary_kl_max"])
@pytest.mark.parametrize("pair", [(-1e-5, -3e-5), (-2e-5, -1e-5)])
def test_probabilities_near_1_lose_no_digits_in_float32(name, pair):
    """1 - p rounds to a multiple of 6e-8, which is 0.6% of 1e-5."""
    p, q = torch.tensor(pair)[:, None]
    exact = oracle.statistic(name, float(p), float(q))
    assert getattr(ops, name)(p, q).item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("name", LARGEST_AT_TOKEN)
def test_no_pair_of_probabilities_exceeds_the_largest_divergence_at_a_token(name):
    log_probs = [-50.0, -14.0, -2.0, -0.7, -1e-3, -1e-9, 0.0]
    found = [oracle.statistic(name, a, b) for a in log_probs for b in log_probs]
    assert LARGEST_AT_TOKEN[name] == pytest.approx(max(found), rel=1e-9)


def test_chi_square_is_the_second_moment_less_one():
    assert ops.chi2(column([math.log(3.0)])).item() == pytest.approx(8.0, rel=1e-14)


@pytest.mark.parametrize("name", ["k3", "chi2"])
def test_small_log_ratios_lose_no_digits(name):
    tiny = 1e-6
    expected = {"k3": tiny**2 / 2, "chi2": 2 * tiny}[name]
    assert getattr(ops, name)(column([tiny])).item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("log_ratio", [1e-3, -1e-3, 1e-4, -1e-4])
@pytest.mark.parametrize("name", ["k3", "chi2"])
def test_small_log_ratios_lose_no_digits_in_float32(name, log_ratio):
    """e^l - 1 rounds to a multiple of 6e-8, which is more than k3 of 1e-4."""
    exact = {"k3": math.expm1(log_ratio) - log_ratio, "chi2": math.expm1(2 * log_ratio)}[name]
    assert getattr(ops, name)(torch.tensor([log_ratio])).item() == pytest.approx(exact, rel=3e-3)


def test_estimators_of_the_same_divergence_agree_in_expectation():
    p, q = column([0.2, 0.5, 0.3]), column([0.4, 0.4, 0.2])
    kl = (q * (q / p).log()).sum()
    for name in ("k1", "k3"):
        torch.testing.assert_close(
            (q * getattr(ops, name)(p.log() - q.log())).sum(), kl, rtol=1e-12, atol=1e-14
        )


def test_log_ratios_have_one_direction_and_read_no_masked_token():
    got = ops.log_ratio(
        column([-1.0, math.nan, -1.0]), column([-3.0, 0.0, math.nan]), torch.tensor([True, False, True])
    )
    assert got.tolist() == [2.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_limits_of_a_log_prob_are_exact(dtype):
    highest = float(torch.tensor(0.01, dtype=dtype))
    limits = torch.tensor([-1000.0, highest], dtype=dtype)
    values = [NAN, math.inf, -math.inf, 0.0, -0.0, 1.0, -1e4]
    for towards in (-math.inf, math.inf):
        values += torch.nextafter(limits, torch.full_like(limits, towards)).tolist()
    values += limits.tolist()
    expected = [-1000 < value <= highest for value in values]
    assert ops.is_log_prob(torch.tensor(values, dtype=dtype)).tolist() == expected


def test_nothing_that_is_compared_has_a_gradient():
    """A step of a user may compute weights from the log-probs themselves."""
    values = torch.tensor([-1.0, -2.0], requires_grad=True)
    mask = torch.ones(2, dtype=torch.bool)
    assert not any(x.requires_grad for x in ops.divergences.compared(values, 2 * values, mask))


def test_bfloat16_log_probs_are_compared_in_float32():
    got = ops.log_ratio(
        torch.zeros(1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16), torch.ones(1) > 0
    )
    assert got.dtype == torch.float32


def test_ess_is_a_fraction():
    mask = torch.tensor([True, True, False])
    assert ops.ess(column([3, 3, math.nan]), mask).item() == 1
    assert ops.ess(column([1, 0, 5]), mask).item() == 0.5
    assert ops.ess(column([0, 0, 0]), mask).item() == 0
    assert ops.ess(column([math.inf, 1, 0]), mask).item() == 0.5
    assert ops.ess(torch.tensor([1e30, 1e30, 0.0]), mask).item() == 1  # the square is beyond float32
    many = torch.full((20_000,), 1e152, dtype=torch.float64)  # the square of whose sum is beyond float64
    assert ops.ess(many, many > 0).item() == pytest.approx(1, rel=1e-12)


def test_perplexity_and_masked_mean():
    mask = torch.tensor([True, False])
    assert ops.perplexity(column([-2.0, math.nan]), mask).item() == pytest.approx(math.exp(2))
    assert ops.masked_mean(column([math.nan]), torch.tensor([False])).item() == 0
    narrow = torch.full((70_000,), 1.0, dtype=torch.float16)  # whose sum is beyond float16
    assert ops.masked_mean(narrow, narrow > 0).item() == 1


def random_tokens(seed, n=50):
    rng = random.Random(seed)
    return [(rng.gauss(0, 0.5), rng.choice([-1.2, 0.0, 0.8]), -rng.expovariate(1)) for _ in range(n)]


def sapo(ratio, advantage, pos, neg):
    tau = pos if advantage > 0 else neg
    return -advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))


def dual(ratio, advantage, c):
    loss = oracle.ppo(ratio, advantage, 0.2)
    return min(loss, -c * advantage) if advantage < 0 else loss


FORMULAS = {
    "reinforce": (lambda x, a, t: surrogates.reinforce(t, a), lambda r, a, t: -a * t),
    "ppo_clip": (lambda x, a, t: surrogates.ppo_clip(x, a, 0.2, 0.2), lambda r, a, t: oracle.ppo(r, a, 0.2)),
    "dual_clip": (lambda x, a, t: surrogates.dual_clip(x, a, 0.2, 0.2, 1.5), lambda r, a, t: dual(r, a, 1.5)),
    "sapo": (lambda x, a, t: surrogates.sapo(x, a, 1.0, 1.05), lambda r, a, t: sapo(r, a, 1.0, 1.05)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_surrogates_match_their_formula(name):
    ours, formula = FORMULAS[name]
    rows = random_tokens(0)
    loss, clipped = ours(*map(column, zip(*rows, strict=True)))
    expected = [formula(math.exp(x), a, t) for x, a, t in rows]
    torch.testing.assert_close(loss, column(expected), rtol=1e-13, atol=1e-14)
    assert clipped.dtype == torch.bool and clipped.shape == loss.shape


def test_clipped_marks_where_the_pessimistic_bound_acts():
    ratio, advantage = column([1.5, 1.5, 0.5, 0.5]), column([1.0, -1.0, 1.0, -1.0])
    assert surrogates.ppo_clip(ratio.log(), advantage, 0.2, 0.2)[1].tolist() == [True, False, False, True]
    far = column([9.0]).log()
    assert surrogates.dual_clip(far, column([-1.0]), 0.2, 0.2, 3.0)[1].tolist() == [True]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_sapo_is_the_policy_gradient_on_policy(advantage):
    log_ratio = column([0.0]).requires_grad_()
    surrogates.sapo(log_ratio, column([advantage]))[0].sum().backward()
    assert log_ratio.grad.item() == pytest.approx(-advantage, abs=1e-14)


def test_the_gate_of_delightful_is_detached_and_opens_for_the_rare_and_good():
    target, advantages = column([-0.1, -3.0, -3.0]).requires_grad_(), column([1.0, 1.0, -1.0])
    loss, clipped = surrogates.delightful(target, advantages, eta=0.5)
    gates = [1 / (1 + math.exp(a * t / 0.5)) for a, t in zip([1.0, 1.0, -1.0], target.tolist(), strict=True)]
    (slope,) = torch.autograd.grad(loss.sum(), target)
    torch.testing.assert_close(slope, -column(gates) * advantages)
    torch.testing.assert_close(loss, -column(gates) * advantages * target)
    assert gates[1] > 0.99 > 0.6 > gates[0] > gates[2] and not clipped.any()
