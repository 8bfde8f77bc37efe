"""Accumulated statistics against the oracle: independent of micro-batches, robust to broken tokens."""

from __future__ import annotations

import math

import pytest
import torch

from slime_ext.metrics import TokenStatistics
from tests import oracle
from tests.batches import flat, tokens


def accumulate(batch, size=100):
    statistics = TokenStatistics()
    for i in range(0, len(batch), size):
        packed, _ = tokens(batch[i : i + size])
        statistics.add(packed.proximal - packed.behavior, packed.segments.mask)
    return statistics


def test_moments_match_the_oracle():
    for seed in range(100):
        batch = oracle.random_batch(seed)
        got = accumulate(batch).reduce()
        for name, expected in oracle.mismatch(batch).items():
            assert got[name] == pytest.approx(expected, rel=1e-10, abs=1e-12), (seed, name)


def test_micro_batches_add_up():
    batch = oracle.random_batch(7)
    whole, parts = accumulate(batch).reduce(), accumulate(batch, 1).reduce()
    assert parts == pytest.approx(whole, rel=1e-12)


def test_ranks_add_up():
    halves = [accumulate(oracle.random_batch(seed)) for seed in (1, 2)]
    other = []
    halves[1].reduce(lambda x: (other.append(x.clone()), x)[1])
    merged = halves[0].reduce(lambda x: x + other[0])
    assert merged == pytest.approx(
        accumulate(oracle.random_batch(1) + oracle.random_batch(2)).reduce(), rel=1e-12
    )


def test_quantiles_are_within_half_a_bin():
    torch.manual_seed(0)
    log_ratio = torch.randn(20000, dtype=torch.float64) * 0.3
    statistics = TokenStatistics()
    statistics.add(log_ratio, torch.ones(20000))
    got = statistics.reduce()
    for name, q in {"p01": 0.01, "p50": 0.5, "p99": 0.99}.items():
        exact = torch.quantile(log_ratio, q).item()
        assert math.log(got[f"mismatch/ratio_{name}"]) == pytest.approx(exact, rel=0.05)  # and a sample apart


def test_weights_have_their_own_sample_size():
    statistics = TokenStatistics()
    statistics.add(
        torch.zeros(4), torch.tensor([1, 1, 1, 0]), weights=torch.tensor([1.0, 0.0, 1.0, math.nan])
    )
    got = statistics.reduce()
    assert got["mismatch/ess_weight"] == pytest.approx(2 / 3) and got[
        "mismatch/weight_mean"
    ] == pytest.approx(2 / 3)


def test_nothing_added_is_all_zero():
    assert set(TokenStatistics().reduce().values()) == {0.0}


def test_a_ratio_beyond_all_others_leaves_one_sample():
    statistics = TokenStatistics()
    statistics.add(torch.tensor([0.0, 400.0], dtype=torch.float64), torch.ones(2))
    assert statistics.reduce()["mismatch/ess"] == 0.5


def test_the_input_dtype_does_not_limit_the_sums():
    statistics = TokenStatistics()
    statistics.add(flat([{"x": [0.1] * 1000}], "x", torch.float32), torch.ones(1000))
    assert statistics.reduce()["mismatch/k1"] == pytest.approx(-torch.tensor(0.1).item(), rel=1e-12)
