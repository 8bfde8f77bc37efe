"""The detectors on dumps of a real language model, from the figures that they read of each."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.faults.cases import FAULTS as FAULTS_OF_TOYS
from benchmarks.faults.figures import (
    OLD,
    diagnosed,
    has_error,
    is_named,
    joined,
    planted,
    read,
    table,
    windows,
    write,
)
from benchmarks.faults.real import NAMES, SEEDS
from benchmarks.faults.world import write as write_world
from slime_ext.tools.analysis.findings import examine

RUNS = read()
FAULTS = [run for run in RUNS if planted(run)[0]]
HEALTHY = [run for run in RUNS if not planted(run)[0]]


def said(diagnosis):
    return [(f.name, f.severity, f.or_else) for f in examine(diagnosis)[0]]


def test_every_fault_is_in_the_set():
    assert {run.rsplit("_", 1)[0] for run in FAULTS} == set(NAMES) and len(HEALTHY) == 75
    assert all({planted(run)[1] for run in runs} == set(range(SEEDS)) for runs in (FAULTS, HEALTHY))


@pytest.mark.parametrize("run", FAULTS)
def test_a_fault_is_named(run):
    whole = joined(RUNS[run])
    assert is_named(run, whole), said(whole)


@pytest.mark.parametrize("run", HEALTHY)
def test_nothing_is_found_in_a_healthy_run_nor_in_any_stretch_of_it(run):
    stretches = {"all": joined(RUNS[run]), **dict(windows(RUNS[run]))}
    found = {at: said(stretch) for at, stretch in stretches.items() if not is_named(run, stretch)}
    assert found == {}


@pytest.mark.parametrize("run", [run for run in FAULTS if run.rsplit("_", 1)[0] in OLD])
def test_no_stretch_of_a_run_of_old_weights_has_an_error(run):
    stretches = dict(windows(RUNS[run]))
    assert not [at for at, stretch in stretches.items() if has_error(stretch)]
    findings = [row for stretch in stretches.values() for row in said(stretch)]
    assert any("stale_weights" in (name, *others) for name, _, others in findings)


@pytest.mark.parametrize("run", [run for run in FAULTS if run.startswith("stale_shifted")])
def test_a_stale_run_that_is_shifted_is_both(run):
    assert {name for name, *_ in said(joined(RUNS[run]))} == {"off_by_one", "stale_weights"}


def test_the_table_of_the_page_is_that_of_the_figures():
    page = (Path(__file__).parents[2] / "benchmarks/faults/RESULTS.md").read_text()
    assert f"\n\n{table()}\n\n" in page


def test_figures_are_what_detectors_read_and_those_of_other_dumps_stay(tmp_path):
    path, said_of = tmp_path / "figures.gz", {}
    for name in ("duplicate_samples", "positive_log_probs"):
        folder = write_world(FAULTS_OF_TOYS[name], tmp_path / name / "dumps")
        shutil.make_archive(str(tmp_path / name / f"{name}_0"), "zip", folder)
        said_of[f"{name}_0"] = said(joined(diagnosed(folder)))
        write(tmp_path / name, path)
    assert {run: said(joined(parts)) for run, parts in read(path).items()} == said_of
