"""Small rollouts that are read in one pass give the same sums, bit by bit, as each of them alone."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch

from slime_ext import presets
from slime_ext.tools.analysis.findings import measures
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.exactness import Exactness
from slime_ext.tools.analysis.measures.histogram import Histogram
from slime_ext.tools.analysis.measures.suggest import Ranking
from slime_ext.tools.analysis.measures.tally import Tally
from slime_ext.tools.analysis.measures.whatif import WhatIf
from slime_ext.tools.analysis.pipeline import JOINED, Result
from slime_ext.tools.analysis.readers.find import Job
from slime_ext.tools.analysis.records import form_of, join
from slime_ext.tools.analysis.tables import tabulated, tabulated_apart
from tests.tools.analysis.rollouts import rollout
from tests.tools.analysis.synthetic import World, run

# torch.sigmoid rounds the last numbers of a tensor differently.
WITH_SIGMOID = ("sapo", "delightful")


def full(seed, **changes):
    """A rollout with values far off, zeros, ids, rewards, versions, turns and cut responses."""
    one = rollout(seed, samples=20, rollout_id=seed, noise=0.02)
    g = torch.Generator().manual_seed(seed)
    size, count = one.size, one.count
    behavior, proximal = one.behavior.clone(), one.proximal.clone()
    behavior[:: 7 + seed % 3], proximal[::11] = 0.0, -6.0
    fields = {
        "behavior": behavior,
        "proximal": proximal,
        "tokens": torch.randint(0, 40, (size,), generator=g),
        "rewards": torch.rand(count, generator=g).double() + seed,
        "versions": torch.randint(max(seed - 2, 0), seed + 1, (size,), generator=g),
        "newest": seed,
        "groups": tuple(i // 4 for i in range(count)),
        "statuses": tuple("truncated" if i % 3 else "completed" for i in range(count)),
    }
    return dataclasses.replace(one, **fields | changes)


def lacking_one(one):
    return one.behavior.index_fill(0, torch.tensor(3), torch.nan)


def flat(value):
    """The content of nested sums as comparable values, with the bits of tensors."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.contiguous().numpy().tobytes()
    if isinstance(value, Histogram):
        return flat([value.counts, value.smallest, value.largest])
    if isinstance(value, Counter | dict):
        return {key: flat(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [flat(one) for one in value]
    if dataclasses.is_dataclass(value):
        return {field.name: flat(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return repr(value)


def tallies():
    corrections = {name: preset.correction for name, preset in presets.PRESETS.items()}
    return WhatIf({name: Tally(one) for name, one in corrections.items() if name not in WITH_SIGMOID})


COLLECTORS = {
    "diagnosis": lambda: Diagnosis(measures=measures(100)),
    "whatif": tallies,
    "exactness": Exactness,
    "ranking": lambda: Ranking(0.02),
}
RUNS = {
    "ragged": [full(seed) for seed in range(5)],
    "bare": [rollout(seed, rollout_id=seed) for seed in range(4)],
    "equal policies": [
        dataclasses.replace(one, proximal=one.behavior) for one in (full(seed) for seed in range(3))
    ],
    "one lacks numbers": [
        full(0),
        full(1, behavior=full(1).behavior.index_fill(0, torch.tensor(3), torch.nan)),
    ],
    "turns of tools": run(World(rollouts=3, samples=8, length=24, tools=range(6, 12))),
}


@pytest.mark.parametrize("kind", COLLECTORS)
@pytest.mark.parametrize("name", RUNS)
def test_joined_rollouts_add_up_to_the_same_bits(name, kind):
    apart, together = COLLECTORS[kind](), COLLECTORS[kind]()
    for one in RUNS[name]:
        apart.add(one)
    together.add(join(RUNS[name]))
    assert flat(vars(together)) == flat(vars(apart))


def test_some_measures_take_joined_rollouts():
    assert {"Beside", "BySurprise", "Ends"} <= {
        name for name, measure in measures(None).items() if measure.takes_joined
    }


@pytest.mark.parametrize("longest", [1, 3, 9, 60])
def test_stretches_are_tabulated_apart(longest):
    g = torch.Generator().manual_seed(longest)
    for _ in range(40):
        counts = torch.randint(0, 30, (5,), generator=g).tolist()
        runs = torch.randint(0, 5, (sum(counts),), generator=g).repeat_interleave(longest)
        index, rows = runs[: sum(counts)], torch.randn(3, sum(counts), generator=g, dtype=torch.float64)
        index[: sum(counts[:2])] = torch.arange(sum(counts[:2])) % 5  # without runs
        stretches = zip(index.split(counts), rows.split(counts, 1), strict=True)
        expected = torch.stack([tabulated(i, r, 4) for i, r in stretches])
        assert torch.equal(tabulated_apart(index, rows, 4, counts), expected)


class Seen:
    """A collector that notes which rollouts came together."""

    def __init__(self):
        self.groups = []

    def add(self, rollout):
        self.groups.append([one.rollout_id for one in rollout.rollouts])


def test_rollouts_wait_for_others_of_their_form_and_keep_their_order(monkeypatch):
    large = rollout(9, samples=JOINED // 4, rollout_id=9)
    assert JOINED // 2 < large.size
    bare, empty = rollout(5, rollout_id=5), rollout(6, samples=1, rollout_id=6)
    rollouts = [full(0), full(1), bare, large, full(2), empty, full(3), full(4)]
    monkeypatch.setattr("slime_ext.tools.analysis.pipeline.load", lambda job: iter(rollouts))
    result = Result({"seen": Seen()})
    result.read(Job((), None, 0))
    result.finish()
    assert empty.size == 0 and form_of(bare) != form_of(full(0))
    assert result.collectors["seen"].groups == [[0, 1], [5], [9], [2], [6], [3, 4]]
    assert not result.waiting
