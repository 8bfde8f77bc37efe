"""The speed commands run and count right; how fast anything is stays out of the tests."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slime_ext.analysis.speed import request, run, workloads
from slime_ext.analysis.speed.cost import count, medians
from slime_ext.analysis.speed.watched import NEW, watched
from slime_ext.analysis.speed.workloads import Batch
from slime_ext.commands import bench
from slime_ext.ops import arrays
from slime_ext.ops.segments import Segments


def test_operations_waits_and_bytes_are_counted():
    x = torch.ones(1000)
    cost = count(lambda: (x[:10] + 1, (x * 2).sum().item()))
    assert (cost.operations, cost.waits) == (4, 1)
    assert cost.megabytes == pytest.approx((80 + 8000 + 4004 + 4) / 1e6)


def test_what_numpy_does_counts_too():
    segments = Segments.whole([3, 5], torch.ones(8, dtype=torch.bool))
    values, of = torch.tensor([1.0, 2.0]), arrays.of
    cost = count(lambda: segments.spread(values) + 1)
    assert (cost.operations, cost.megabytes) == (2, pytest.approx((8 + 16 + 32 + 64) / 1e6))
    assert arrays.of is of  # as it was


def noted(body):
    """The operations of numpy on what it sees of a tensor [4]."""
    found = []
    with watched(lambda name, read, made: found.append(name)):
        body(arrays.of(torch.tensor([3.0, 1.0, 2.0, 4.0])))
    return found


def test_every_kind_of_operation_of_numpy_is_noted_once():
    assert noted(lambda x: x + 1) == noted(lambda x: 1 + x) == ["add"]
    assert noted(lambda x: np.add(x, 1, out=x)) == ["add"]
    assert noted(lambda x: np.add.reduce(x, where=x > 2)) == ["greater", "add"]
    assert noted(lambda x: np.add.reduceat(x, [0, 2])) == ["add"]
    assert noted(lambda x: np.where(x > 2, x, 0)) == ["greater", "where"]
    assert noted(lambda x: np.einsum("nb->n", x.reshape(2, 2))) == ["einsum"]
    assert noted(lambda x: x @ x) == ["matmul"]
    assert noted(lambda x: x.astype(np.float64).sum()) == ["astype", "sum"]
    assert noted(lambda x: x.astype(np.float32, copy=False)) == []
    assert noted(lambda x: x[1:].view(np.int32)) == noted(lambda x: np.ndim(x)) == []
    assert noted(lambda x: x.fill(0)) == ["fill"]
    assert noted(lambda x: x.__setitem__(0, 1)) == ["setitem"]
    assert noted(lambda x: np.count_nonzero(x[np.newaxis] > 1)) == ["greater", "count_nonzero"]
    assert noted(lambda x: np.concatenate([x, x]) * 2) == ["concatenate", "multiply"]
    assert noted(lambda x: arrays.new(4).fill(1)) == [NEW, "fill"]
    assert noted(lambda x: arrays.table([x, x > 1]) + 1) == ["greater", "table", "add"]


def test_memory_that_numpy_takes_counts_while_it_is_held():
    def body():
        first = arrays.of(torch.ones(1000)) + 1
        del first
        return arrays.new(1000, np.float32), arrays.of(torch.ones(1000)) + 1

    assert count(body).peak == pytest.approx((4000 + 8000) / 1e6)  # with the tensors that numpy sees


def test_the_peak_is_of_new_tensors_that_are_alive_at_once():
    x = torch.ones(1000)

    def body():
        for _ in range(5):
            y = x + 1  # 4 kB, and for a moment another 4
        return y

    assert count(body).peak == pytest.approx(8000 / 1e6)


def test_boolean_indexing_waits():
    x = torch.ones(4)
    assert count(lambda: x[x > 0]).waits == 1


def test_the_slope_of_a_power_is_its_exponent():
    assert workloads.slope([1, 10, 100], [3, 3e2, 3e4]) == pytest.approx(2)


def test_the_floor_reads_three_and_writes_two():
    batch = Batch.of([3, 2])
    workloads.floor("S")(batch)
    assert torch.equal(batch.room[0], batch.flat_proximal - batch.flat_behavior)
    assert torch.equal(batch.room[1], -batch.room[0])


def test_slow_contenders_run_less_often():
    calls = []
    medians({"slow": lambda: calls.append(sum(range(100000)))}, 20, slow_ms=0)
    assert len(calls) == 4


@pytest.fixture
def settled(monkeypatch):
    for key, value in request.ALLOCATOR.items():
        monkeypatch.setenv(key, value)


def test_speed_prints_a_table(capsys, monkeypatch, settled):
    monkeypatch.setattr(run, "lengths_of", lambda _: [40, 3])
    assert bench.main(["speed", "--workloads", "d", "--repeat", "1", "--backends", "eager"]) == 0
    shown = capsys.readouterr().out
    assert "configuration S" in shown and "ours eager, all metrics" in shown and "floor" in shown


@pytest.mark.slow
def test_scale_prints_its_tables(capsys, settled):
    small = ["--backend", "eager", "--most", "100000", "--tokens", "65536", "--repeat", "1"]
    assert bench.main(["scale", *small]) == 0
    assert capsys.readouterr().out.count("processor ms") == 3


def test_what_is_asked_for_by_letter_is_there():
    assert set(request.CONFIGS) == set(run.OURS)
    assert all(workloads.lengths_of(letter) for letter in request.WORKLOADS)
