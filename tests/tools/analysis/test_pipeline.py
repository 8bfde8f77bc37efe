"""Several processes find what one finds."""

from __future__ import annotations

import os

import pytest
import torch

from slime_ext.errors import DataError
from slime_ext.tools.analysis.findings import measures
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.pipeline import collect
from slime_ext.tools.analysis.readers.find import find
from tests.ranks import GROUP, server
from tests.tools.analysis import dumps
from tests.tools.analysis.synthetic import World, run
from tests.tools.analysis.test_measures import counts_of


class Kills:
    """A collector that takes its process down."""

    def add(self, rollout):
        os._exit(9)

    def merge(self, other):
        pass


pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(GROUP)]


@pytest.fixture
def forks(monkeypatch):
    """Forks new processes from one that has imported torch. They get the same pickled data."""
    context = server()
    monkeypatch.setattr("multiprocessing.get_context", {"spawn": context}.__getitem__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    dumps.write_run(path, run(World(rollouts=3, samples=6, length=12)))
    (path / "train_data" / "7.pt").write_bytes(b"no dump")
    return path


def test_processes_find_what_one_finds(folder, forks):
    jobs, seen = find([folder]).jobs, []
    alone = collect(jobs, {"d": Diagnosis(measures=measures(None))}, done=seen.append)
    both = collect(jobs, {"d": Diagnosis(measures=measures(None))}, processes=2)
    one, two = alone.collectors["d"], both.collectors["d"]
    assert (alone.rollouts, len(alone.skipped), len(seen)) == (3, 1, 4)
    assert (both.rollouts, both.skipped, both.notes) == (3, alone.skipped, alone.notes)
    assert one.timeline == two.timeline and counts_of(one.sums) == pytest.approx(counts_of(two.sums))
    assert one.sums.distribution() == two.sums.distribution()
    counts = [[p.count for curve in d.all_curves() for p in curve.points] for d in (one, two)]
    assert counts[0] == counts[1] and torch.allclose(one.means.sums, two.means.sums)


def test_a_killed_process_is_told(folder, forks):
    with pytest.raises(DataError, match="--jobs: expected every process to finish, got a killed process"):
        collect(find([folder]).jobs, {"d": Kills()}, processes=2)
