"""Ages of weights that only a whole run tells."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slime_ext.tools.analysis.findings import measures
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from tests.tools.analysis.synthetic import World, run


def diagnosed(rollouts):
    diagnosis = Diagnosis(measures=measures(None))
    for rollout in rollouts:
        diagnosis.add(rollout)
    return diagnosis


def slime_like(interval, rollouts=6):
    """Versions count pushes, and the trainer's is not known."""
    found = run(World(rollouts=rollouts, samples=16, length=24, interval=interval, learning=0.02))
    pushes = [r.versions // interval + 1 for r in found]
    return [replace(r, versions=v, newest=int(v.max())) for r, v in zip(found, pushes, strict=True)]


def test_weights_age_by_rollouts():
    diagnosis = diagnosed(slime_like(3))
    (curve,) = [c for c in diagnosis.all_curves() if c.name == "staleness"]
    assert [p.x for p in curve.points] == [0, 1, 2]
    assert curve.points[0].absolute < curve.points[1].absolute < curve.points[2].absolute
    assert [m.numbers.least_staleness for m in diagnosis.moments()] == [0, 1, 2, 0, 1, 2]
    assert {m.numbers.staleness for m in diagnosis.moments()} == {None}  # a lower bound is no age
    sizes = [m.numbers.tokens for m in diagnosis.moments()]
    mean = sum(n * age for n, age in zip(sizes, [0, 1, 2] * 2, strict=True)) / sum(sizes)
    assert diagnosis.numbers().least_staleness == pytest.approx(mean) and diagnosis.notes()


def test_ages_that_the_dumps_do_not_hold_are_bounded_from_below():
    """A sampler that is two pushes late, and gets no more weights after a restart of the trainer."""
    versions = [max(r - 2, 0) for r in range(8)] + [6] * 12
    found = run(World(rollouts=20, samples=4, length=6))
    diagnosis = diagnosed(
        replace(r, versions=torch.full_like(r.versions, v), newest=v)
        for r, v in zip(found, versions, strict=True)
    )
    bounds, ages = [0, 1, 2, *[0] * 5, *range(12)], [0, 1, *[2] * 6, *range(2, 14)]
    assert [m.numbers.least_staleness for m in diagnosis.moments()] == bounds
    sizes = [m.numbers.tokens for m in diagnosis.moments()]
    least, mean = (sum(n * age for n, age in zip(sizes, x, strict=True)) / sum(sizes) for x in (bounds, ages))
    numbers = diagnosis.numbers()
    assert numbers.least_staleness == pytest.approx(least) and least < mean == pytest.approx(5.15, abs=0.5)
    assert numbers.staleness is None  # 3.48 was printed as the age


def test_a_counter_that_begins_again_is_no_age():
    """A job that is resumed counts its pushes from the beginning, with new weights."""
    found = run(World(rollouts=8, samples=16, length=24))
    for versions, is_aged in (((1, 2, 3, 4) * 2, False), ((1, 2, 3, 2), True)):
        made = [
            replace(r, versions=torch.full_like(r.versions, v), newest=v)
            for r, v in zip(found, versions, strict=False)
        ]
        assert bool(diagnosed(made).notes()) == is_aged


def test_fresh_weights_and_known_ages_stay_as_they_are():
    for rollouts in [slime_like(1), run(World(rollouts=4, samples=16, length=24, interval=2))]:
        diagnosis = diagnosed(rollouts)
        assert diagnosis.notes() == () and diagnosis.numbers() == diagnosis.sums.numbers()
        assert diagnosis.moments() == tuple(diagnosis.timeline)


@pytest.mark.parametrize(
    ("newest", "wanted"),
    [
        ((1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4), 4),  # train_async.py pushes late the first time
        ((1, 2, 3, 4), 1),
        ((3, 3, 4, 4, 5), 2),
        ((1, 1, 1, 1, 2, 2), None),  # one push
        ((1, 1, 1), None),
        ((), None),
    ],
)
def test_the_rollouts_of_a_push_are_counted(newest, wanted):
    found = run(World(rollouts=14, samples=4, length=6))
    made = [
        replace(r, versions=torch.full_like(r.versions, v), newest=None)
        for r, v in zip(found, newest, strict=False)
    ]
    assert diagnosed(made).rollouts_per_push() == wanted
    some = [rollout for rollout in made if rollout.rollout_id % 2 == 0]
    assert diagnosed(some).rollouts_per_push() is None  # in every second dump each version is new
