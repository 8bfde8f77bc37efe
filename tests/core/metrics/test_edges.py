"""Metrics of a few tokens whose values can be read off, where something is missing or beyond all bins."""

from __future__ import annotations

import math

import pytest
import torch

from slime_ext import presets
from slime_ext.core import metrics
from slime_ext.core.correction import Correction, Plan
from slime_ext.core.metrics import MetricsLayout
from slime_ext.core.steps import Reject
from tests import oracle
from tests.batches import tokens
from tests.core.metrics.test_statistics import accumulated, measure, numbers_of, one_long, scalars


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


def test_the_median_is_within_its_bound_wherever_it_lies_in_its_bin():
    for i in range(40):
        log_ratio = 0.3 * 1.01**i
        got = scalars(Correction(), one_long([-9.0, log_ratio, 9.0]))
        assert math.log(got["ratio_p50"]) == pytest.approx(log_ratio, rel=0.0308)


@pytest.mark.parametrize("log_ratios", [[-9.0, 0.0, 0.0, 9.0], [0.0, 0.0, 9.0, 9.0]])
def test_half_of_the_tokens_on_policy_have_a_median_of_1(log_ratios):
    assert scalars(Correction(), one_long(log_ratios))["ratio_p50"] == 1


def test_a_sequence_without_response_tokens_is_no_sample():
    batch = one_long([1.0]) + one_long([0.0]) + one_long([1.0], mask=[0])
    got = scalars(Correction(steps=(Reject("sequence", high=2.0),)), batch)
    assert (got["sequences"], got["rejected_sequence_fraction"]) == (2, 0.5)


@pytest.mark.parametrize("ages", [None, [math.nan, math.nan]])
def test_where_no_age_is_known_there_is_no_staleness(ages):
    totals = accumulated(Correction(), one_long([0.1]) + one_long([0.2]), ages=ages)
    names = {**metrics.scalars(totals), **metrics.curves(totals)}
    assert not [name for name in names if "staleness" in name]


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
    metrics.reduce(plan, None, lambda x: (sent.append(x.clone()), x)[1], rank=1 - rank, size=2)
    merged, _ = metrics.reduce(plan, measured, lambda x: x + sent[0], rank=rank, size=2)
    assert metrics.scalars(merged) == metrics.scalars(accumulated(correction, batch))
