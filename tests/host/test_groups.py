"""What samples of one rollout or one prompt mean for each other, on tables whose answers can be read off."""

from __future__ import annotations

import math
import statistics

import pytest

from slime_ext.correction import Correction
from slime_ext.host import rollout_data as groups
from slime_ext.host.rollout_data import SampleRow
from slime_ext.host.step_plan import what_couples
from slime_ext.steps import Reject, SecondMoment

NAN = math.nan
REJECTS = (Reject(high=2.0),)


def row(*, rollout=0, group=0, step=0, tokens=10, kept=10, denominator=10, reward=0.0):
    return SampleRow(rollout, group, step, tokens, kept, denominator, reward)


def rewarded(rewards, rejected=()):
    """One group; a second one, of which nothing is rejected, gets no advantages."""
    rows = [row(kept=0 if i in rejected else 10, reward=r) for i, r in enumerate(rewards)]
    return [*rows, row(group=1, reward=5.0)]


@pytest.mark.parametrize(
    ("tokens", "kept", "rejected"), [(10, 0, True), (10, 1, False), (0, 0, False), (1, 0, True)]
)
def test_a_sample_is_rejected_when_it_has_tokens_and_keeps_none(tokens, kept, rejected):
    rows = [row(group=3, tokens=tokens, kept=kept), row(group=4)]
    assert groups.broken_groups(rows) == ({3} if rejected else set())


def test_nothing_is_kept_of_a_broken_group():
    rows = [row(group=3), row(group=4)]
    assert [r.kept for r in groups.without_groups(rows, {3})] == [0, 10]


def test_a_rollout_is_divided_by_what_all_its_samples_keep():
    rows = [row(kept=2, denominator=20), row(kept=3, denominator=20), row(rollout=1, kept=0, denominator=7)]
    assert groups.rollout_factors(rows) == [4.0, 4.0, 1.0]


def test_an_optimizer_step_is_divided_by_what_it_keeps():
    rows = [row(tokens=9, kept=5), row(tokens=0, kept=0), row(step=1, tokens=4, kept=0)]
    assert groups.token_factors(rows) == [2.0, 2.0, 1.0]  # 9 tokens, and 1 for the sample without any


@pytest.mark.parametrize("by_std", [False, True])
def test_a_rejected_sample_leaves_the_baseline_of_its_group(by_std):
    found = groups.rebaselined(rewarded([1.0, 3.0, 2.0, 100.0, NAN], rejected=[3]), by_std=by_std)
    scale = statistics.stdev([1.0, 3.0, 2.0]) + 1e-6 if by_std else 1
    assert found == [pytest.approx(x / scale) for x in (-1.0, 1.0, 0.0)] + [0.0, 0.0, None]


@pytest.mark.parametrize("by_std", [False, True])
@pytest.mark.parametrize("rejected", [[1], [0, 1]])
def test_of_one_sample_alone_nothing_is_learned(rejected, by_std):
    assert groups.rebaselined(rewarded([1.0, 3.0], rejected), by_std=by_std) == [0.0, 0.0, None]


@pytest.mark.parametrize(
    ("fields", "keys"),
    [
        ({"steps": (SecondMoment(),)}, "second_moment"),
        ({"steps": REJECTS, "denominator": "kept"}, "denominator: kept"),
        ({"steps": (*REJECTS, SecondMoment()), "group": "atomic"}, "second_moment, group: atomic"),
    ],
)
def test_messages_name_the_keys_that_couple_samples(fields, keys):
    assert what_couples(Correction(**fields)) == keys
