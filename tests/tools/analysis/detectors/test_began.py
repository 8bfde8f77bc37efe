"""The rollout in which a mismatch began, held against planted onsets."""

from __future__ import annotations

import math
import random

import pytest

from slime_ext.tools.analysis.detectors.shared.began import Began, began
from tests.tools.analysis.detectors.toys import Policy, findings, sampled

RUNS = 120
HEALTHY, COVERS, WIDE = 1e-3, 0.95, 3.0  # nats of k3; share of the intervals; rollouts, the mean width


def planted(seed, onset, count):
    """k3 of a run whose mismatch begins in a rollout and stays, grows, or grows faster."""
    g = random.Random(seed)
    power, size = g.choice((0, 1, 2)), g.choice((2.0, 10.0, 100.0))
    scatter, error = g.choice((0.0, 0.1, 0.2)), g.choice((0.05, 0.15))
    excess = [max(i - onset + 1, 0) for i in range(count)]
    means = [HEALTHY * (1 + size * (age > 0) * (age / 3) ** power) for age in excess]
    errors = [error * g.uniform(0.5, 1.5) for _ in means]
    drawn = [k3 * math.exp(g.gauss(0, scatter) + g.gauss(0, e)) for k3, e in zip(means, errors, strict=True)]
    return drawn, errors


def test_the_interval_holds_the_planted_onset():
    dates, onsets = [], []
    for seed in range(RUNS):
        g = random.Random(1000 + seed)
        count = g.choice((8, 12, 20, 40))
        onset = g.randint(1, count - 2)
        dates.append(began(range(100, 100 + count), *planted(seed, onset, count)))
        onsets.append(100 + onset)
    known = [(date, onset) for date, onset in zip(dates, onsets, strict=True) if date]
    assert len(known) >= 0.9 * RUNS
    assert sum(date.first <= onset <= date.last for date, onset in known) >= COVERS * len(known)
    assert sum(date.last - date.first for date, _ in known) <= WIDE * len(known)
    assert sum(abs(date.rollout - onset) for date, onset in known) <= len(known)  # one rollout in the mean


def test_a_run_without_an_onset_has_no_date():
    g, dates = random.Random(5), 0
    for _ in range(RUNS):
        values = [HEALTHY * math.exp(g.gauss(0, 0.2)) for _ in range(20)]
        dates += began(range(20), values, [0.15] * 20) is not None
    assert dates <= 0.05 * RUNS


@pytest.mark.parametrize("onset", [2, 700, 1390])
def test_an_onset_is_found_in_a_long_run(onset):
    g = random.Random(onset)
    values = [HEALTHY * (1 + 4 * (i >= onset)) * math.exp(g.gauss(0, 0.2)) for i in range(1400)]
    date = began(range(1400), values, [0.1] * 1400)
    assert date and date.first <= onset <= date.last and date.last - date.first <= 5


def test_a_date_is_said_with_its_interval():
    assert str(Began(12, 11, 13)) == "began in rollout 12 (11 to 13)"
    assert str(Began(12, 12, 12)) == "began in rollout 12"


def test_what_changes_at_the_onset_is_said():
    """An engine that restarts with other weights: its versions start again in the rollout of the onset."""
    policy, rollouts = Policy(), []
    other = policy.table + 0.5 * policy.normal(*policy.table.shape)
    for number in range(10):
        is_other = number in (6, 7)
        rollout = sampled(policy, number, sampler=other if is_other else None)
        versions = rollout.versions - 6 if number >= 6 else rollout.versions
        rollouts.append(rollout.__class__(**{**rollout.__dict__, "versions": versions, "newest": None}))
        policy.step()
    (finding,) = (f for f in findings(rollouts).values() if f.is_fault)
    assert "began in rollout 6" in finding.evidence and "versions start again" in finding.evidence
