"""Ages of weights that only a whole run tells."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch

from slime_ext.tools.analysis.findings import examine, measures
from slime_ext.tools.analysis.findings.recommend import recommend
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from tests.tools.analysis.rollouts import joined
from tests.tools.analysis.synthetic import World, run


def diagnosed(rollouts, of_detectors=()):
    """What is measured of rollouts; ages need nothing that detectors add up."""
    diagnosis = Diagnosis(measures=dict(of_detectors))
    for rollout in joined(rollouts):
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


def of_versions(versions, first=0, samples=4):
    """Rollouts whose tokens all have the given version; the trainer's is not known."""
    found = run(World(rollouts=first + len(versions), samples=samples, length=6))[first:]
    return [
        replace(r, versions=torch.full_like(r.versions, v), newest=v)
        for r, v in zip(found, versions, strict=True)
    ]


@cache
def alone(number, version):
    """What is measured of one rollout of 14 whose tokens all have the given version."""
    return diagnosed(of_versions([version] * 14)[number : number + 1])


def bounds_of(versions, first=0):
    """The bounds of each rollout, from what is measured of each alone, as by processes that share a run."""
    diagnosis = diagnosed([])
    for number, version in enumerate(versions, first):
        diagnosis.merge(alone(number, version))
    return [(m.numbers.least_staleness, m.numbers.most_staleness) for m in diagnosis.moments()]


def test_the_bounds_of_a_run_do_not_depend_on_how_it_is_shared():
    versions = [max(r - 2, 0) for r in range(8)] + [6] * 6
    whole = diagnosed(of_versions(versions)).moments()
    assert bounds_of(versions) == [(m.numbers.least_staleness, m.numbers.most_staleness) for m in whole]


def test_ages_that_the_dumps_do_not_hold_are_bounded():
    """A sampler that is two pushes late, and gets no more weights after a restart of the trainer."""
    diagnosis = diagnosed(of_versions([max(r - 2, 0) for r in range(8)] + [6] * 12))
    least, ages = [0, 1, 2, *[0] * 5, *range(12)], [0, 1, *[2] * 6, *range(2, 14)]
    assert [m.numbers.least_staleness for m in diagnosis.moments()] == least
    assert [m.numbers.most_staleness for m in diagnosis.moments()] == ages
    sizes = [m.numbers.tokens for m in diagnosis.moments()]
    low, mean = (sum(n * age for n, age in zip(sizes, x, strict=True)) / sum(sizes) for x in (least, ages))
    numbers = diagnosis.numbers()
    assert numbers.least_staleness == pytest.approx(low) and numbers.most_staleness == pytest.approx(mean)
    assert mean == pytest.approx(5.15, abs=0.5) and numbers.staleness is None  # 3.48 was printed as the age


def simulated(seed):
    """Versions of a run, the true ages of their weights in rollouts, and whether a restart is unseen.

    The trainer pushes every few rollouts; a push reaches the sampler some rollouts late, or never; the
    job, or only its engine, may be restarted with a counter that begins again.
    """
    random = Random(seed)
    every, delay, restart = random.choice((1, 1, 2, 3)), random.choice((0, 1, 2)), random.choice((None, 5, 9))
    loses_weights, stops = random.random() < 0.5, random.choice((99, 7))
    version, pushed, arrives, versions, ages = 1, 0, [], [], []
    used = (1, 0)  # version, and the rollouts that its weights have seen
    for rollout in range(14):
        if rollout == restart:
            version, pushed, arrives = 1, rollout, []
            used = (1, 0 if loses_weights else rollout)
        elif rollout and rollout % every == 0:
            version, pushed = version + 1, rollout
            arrives.append((rollout + delay, version, pushed))
        for at, number, seen in arrives:
            if at <= rollout < stops:
                used = (number, seen)
        versions.append(used[0])
        ages.append(rollout - used[1])
    starts_unseen = restart is not None and versions[restart] == versions[restart - 1]  # both are 1
    return versions, ages, starts_unseen


@pytest.mark.parametrize("seed", range(40))
def test_the_true_age_is_within_its_bounds(seed):
    versions, ages, starts_unseen = simulated(seed)
    bounds = bounds_of(versions)
    if bounds[0][0] is None:  # no version sampled twice
        return
    if starts_unseen:
        assert all(age <= most for (_, most), age in zip(bounds, ages, strict=True))
        return
    assert all(least <= age <= most for (least, most), age in zip(bounds, ages, strict=True)), versions


def test_there_is_no_upper_bound_where_none_is_sound():
    assert bounds_of([3, 3, 4], first=4) == [(0, None), (1, None), (0, None)]  # no rollout 0
    assert bounds_of([0, 3, 3, 6]) == [(0, None), (0, None), (1, None), (0, None)]  # 3 a rollout


def test_bounds_that_do_not_decide_recommend_nothing():
    """A push that came late once: whether the later ones are late, too, nobody knows."""
    diagnosis = diagnosed(of_versions([0, 0, *range(1, 19)], samples=16))
    numbers = diagnosis.numbers()
    assert numbers.least_staleness < 0.1 and 0.9 < numbers.most_staleness < 1
    made = recommend((), numbers)
    assert not made.is_made and "nobody knows whether they lag" in made.reasons[0]
    assert "slime_ext.host.log_rollout" in made.reasons[1]
    known = recommend((), replace(numbers, staleness=0.95, least_staleness=None))
    assert "0.95 versions old" in known.reasons[0]  # of train_async.py, whose rollout 0 is fresh


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


def test_a_run_that_pushes_after_every_rollout_is_not_told_to_push_more_often_without_a_condition():
    late = run(World(rollouts=6, samples=16, length=32, late=2, learning=0.02))
    diagnosis = diagnosed(
        [
            replace(r, versions=torch.full_like(r.versions, max(r.rollout_id - 2, 0)), newest=None)
            for r in late
        ],
        of_detectors=measures(None),
    )
    ((finding, *_), _) = examine(diagnosis)
    assert finding.name == "stale_weights" and diagnosis.rollouts_per_push() == 1
    assert "ush weights" not in finding.fix and "If rollouts share a push, push more often" in finding.fix
