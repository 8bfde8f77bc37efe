"""The detectors on dumps of a real language model, from the figures that they read of each."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path

import pytest

from benchmarks.faults import cases, figures
from benchmarks.faults.figures import (
    OLD,
    WINDOWS,
    diagnosed,
    is_named,
    joined,
    read,
    table,
    windows,
    write,
)
from benchmarks.faults.real import HEALTHY_OF_A_SEED, NAMES, SEEDS
from benchmarks.faults.world import write as write_world
from slime_ext.tools.analysis.findings import examine

pytestmark = pytest.mark.xdist_group("real faults")  # one worker reads the figures
FAULTS = [f"{name}_{seed}" for name, seed in product(NAMES, range(SEEDS))]
HEALTHY = [f"{cases.HEALTHY}-{n}_{seed}" for n, seed in product(range(HEALTHY_OF_A_SEED), range(SEEDS))]


@pytest.fixture(scope="module")
def runs():
    return read()


def said(diagnosis):
    return [(f.name, f.severity, f.or_else) for f in examine(diagnosis)[0]]


def test_the_set_has_every_fault_and_the_healthy_runs_of_every_seed(runs):
    assert runs.keys() == {*FAULTS, *HEALTHY}


@pytest.mark.parametrize("run", FAULTS)
def test_a_fault_is_named(runs, run):
    whole = joined(runs[run])
    assert is_named(run, whole), said(whole)


@pytest.mark.parametrize("run", HEALTHY)
def test_nothing_is_found_in_a_healthy_run_nor_in_any_stretch_of_it(runs, run):
    stretches = dict(windows(runs[run]))
    if len(runs[run]) not in WINDOWS:  # else the whole run is one of them
        stretches["all"] = joined(runs[run])
    found = {at: said(stretch) for at, stretch in stretches.items() if not is_named(run, stretch)}
    assert found == {}


@pytest.mark.parametrize("run", [run for run in FAULTS if run.rsplit("_", 1)[0] in OLD])
def test_no_stretch_of_a_run_of_old_weights_has_an_error(runs, run):
    findings = [(at, *row) for at, stretch in windows(runs[run]) for row in said(stretch)]
    assert not [at for at, _, severity, _ in findings if severity == "error"]
    assert any("stale_weights" in (name, *others) for _, name, _, others in findings)


@pytest.mark.parametrize("run", [run for run in FAULTS if run.startswith("stale_shifted")])
def test_a_stale_run_that_is_shifted_is_both(runs, run):
    assert {name for name, *_ in said(joined(runs[run]))} == {"off_by_one", "stale_weights"}


def test_the_table_of_the_page_is_that_of_the_figures(runs, monkeypatch):
    """Where every run and stretch is right, as the tests above ask of each; they are not examined again."""
    monkeypatch.setattr(figures, "read", lambda: runs)
    monkeypatch.setattr(figures, "joined", lambda parts: parts)
    monkeypatch.setattr(figures, "is_named", lambda run, parts: True)
    monkeypatch.setattr(figures, "has_error", lambda parts: False)
    page = (Path(__file__).parents[2] / "benchmarks/faults/RESULTS.md").read_text()
    assert f"\n\n{table()}\n\n" in page


def test_figures_are_what_detectors_read_and_those_of_other_dumps_stay(tmp_path):
    path, said_of = tmp_path / "figures.gz", {}
    for name in ("duplicate_samples", "positive_log_probs"):
        folder = write_world(cases.FAULTS[name], tmp_path / name / "dumps")
        shutil.make_archive(str(tmp_path / name / f"{name}_0"), "zip", folder)
        said_of[f"{name}_0"] = said(joined(diagnosed(folder)))
        write(tmp_path / name, path)
    assert {run: said(joined(parts)) for run, parts in read(path).items()} == said_of
