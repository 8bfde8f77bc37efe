"""The speed commands run and count right; how fast anything is stays out of the tests."""

from __future__ import annotations

import functools
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.speed import center, overhead, request, run, scale, workloads
from benchmarks.speed.__main__ import main
from benchmarks.speed.cost import count, dispatched
from benchmarks.speed.workloads import Batch
from tests.ranks import GROUP, server


def test_operations_waits_and_bytes_are_counted():
    x = torch.ones(1000)
    cost = count(lambda: (x[:10] + 1, (x * 2).sum().item()))
    assert (cost.operations, cost.waits) == (4, 1)
    assert cost.megabytes == pytest.approx((80 + 8000 + 4004 + 4) / 1e6)


def test_the_peak_is_of_new_tensors_that_are_alive_at_once():
    x = torch.ones(1000)

    def body():
        for _ in range(5):
            y = x + 1  # 4 kB, and for a moment another 4
        return y

    assert count(body).peak == pytest.approx(8000 / 1e6)


def test_the_slope_of_a_power_is_its_exponent():
    assert workloads.slope([1, 10, 100], [3, 3e2, 3e4]) == pytest.approx(2)


def test_the_floor_reads_three_and_writes_two():
    batch = Batch.of([3, 2])
    workloads.floor("S")(batch)
    assert torch.equal(batch.written[0], batch.flat_proximal - batch.flat_behavior)
    assert torch.equal(batch.written[1], -batch.written[0])


@pytest.fixture
def settled(monkeypatch):
    for key, value in request.KEEP_MEMORY.items():
        monkeypatch.setenv(key, value)


def test_speed_prints_a_table(capsys, monkeypatch, settled):
    monkeypatch.setattr(run, "lengths_of", lambda _: [40, 3])
    assert main(["against", "--workloads", "d", "--repeat", "1"]) == 0
    shown = capsys.readouterr().out
    assert "configuration S" in shown and "ours, all metrics" in shown and "floor" in shown


def test_overhead_prints_its_table(capsys, monkeypatch, settled):
    monkeypatch.setattr(overhead, "SHAPES", ((2, 3),))
    assert main(["overhead", "--repeat", "1"]) == 0
    shown = capsys.readouterr().out
    assert "the fastest of 1 calls" in shown and "2 x 3" in shown and "µs, " in shown


def test_dispatches_are_counted_after_what_is_looked_up_once():
    x, calls = torch.ones(8), []

    def body():
        first = not calls
        calls.append(None)
        return x + 1 if first else (x[:2] + 1).sum()

    assert dispatched(body) == 3 and len(calls) == 2


def test_center_prints_its_tables(capsys, monkeypatch, settled):
    monkeypatch.setattr(center, "lengths_of", lambda _: [40, 3])
    monkeypatch.setattr(center, "VOCABULARY", 200)
    assert main(["center", "--repeat", "1"]) == 0
    shown = capsys.readouterr().out
    assert "term of 43 tokens" in shown and "ours, IcePop 0.5 to 2" in shown and "1,024 x 200" in shown


@pytest.mark.slow
@pytest.mark.xdist_group(GROUP)
def test_scale_prints_its_tables(capsys, monkeypatch, settled):
    server()  # imports torch for the ranks
    forked = functools.partial(torch.multiprocessing.start_processes, start_method="forkserver")
    monkeypatch.setattr(torch.multiprocessing, "spawn", forked)
    monkeypatch.setattr(scale, "RANKS", (1, 2))
    small = ["--most", "100000", "--tokens", "65536", "--repeat", "1"]
    assert main(["scale", *small]) == 0
    assert capsys.readouterr().out.count("processor ms") == 3


def test_what_is_asked_for_by_letter_is_there():
    assert set(request.CONFIGS) == set(run.STEPS)
    assert all(workloads.lengths_of(letter) for letter in request.WORKLOADS)


WRONG = {
    "against --workloads az": "expected letters out of abcde, got 'az'",
    "against --configs ''": "expected letters out of TS, got ''",
    "against --repeat 0": "expected an integer of 1 or more, got '0'",
    "against --slime-dir nowhere": "--slime-dir: expected a checkout of slime, got nowhere",
    "against --others nowhere": "--others: expected a Python, got nowhere",
    "scale --repeat -1": "expected an integer of 1 or more, got '-1'",
    "scale --most 1e6": "expected an integer of 100000 or more, got '1e6'",
    "scale --tokens 4095": "expected an integer of 4096 or more, got '4095'",
    "agains": "invalid choice: 'agains'",
}


def refused(words, capsys):
    """What is printed for a mistake, on the last line."""
    try:
        status = main(words)
    except SystemExit as left:
        status = left.code
    assert status == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_a_mistake_is_one_line(capsys):
    for words, text in WRONG.items():
        assert text in refused(shlex.split(words), capsys)


@pytest.mark.parametrize("flag", [["--others", sys.executable], [f"--others={sys.executable}"]])
def test_another_python_is_asked_without_the_flag_that_names_it(monkeypatch, flag):
    started = []

    def start(words, **_):
        started.append(words)
        return SimpleNamespace(returncode=3, stdout="")

    monkeypatch.setattr(request, "subprocess", SimpleNamespace(run=start))
    assert main(["against", "--configs", "T", *flag, "--repeat", "1"]) == 3
    ((python, *words),) = started
    assert python == sys.executable
    assert words[-6:] == ["benchmarks.speed", "against", "--configs", "T", "--repeat", "1"]


def test_the_page_says_how_many_operations_a_call_dispatches():
    page = (Path(__file__).parents[2] / "docs/performance.md").read_text()
    batch = Batch.of([64] * 8)
    rows = {"T": "token weights with a cap", "S": "sequence weights with a cap, geometric mask, veto"}
    for config, row in rows.items():
        bodies = run.ours(config)
        counts = [
            dispatched(functools.partial(bodies[name], batch)) for name in ("ours", "ours, all metrics")
        ]
        assert f"| {row} | {counts[0]} | {counts[1]} |" in page
