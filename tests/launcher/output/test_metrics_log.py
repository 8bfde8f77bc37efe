"""metrics.jsonl: strict JSON, one line each, cut where a resumed run starts again."""

from __future__ import annotations

import json

import pytest
import torch

from slime_ext.errors import DataError
from slime_ext.launcher.output.metrics_log import MetricsLog, read_metrics


def write(path, rollouts, **settings):
    log = MetricsLog(path, **settings)
    for i in rollouts:
        log.log("step", {"train/loss": i / 2}, rollout_id=i, step=i + 1)
    log.close()


def test_a_line_has_its_place_and_its_numbers(tmp_path):
    log = MetricsLog(tmp_path)
    log.log("rollout", {"a": torch.tensor(0.5), "b": 3, "c": None}, rollout_id=4, step=9)
    (row,) = read_metrics(tmp_path)
    assert row.pop("time") > 1e9
    assert row == {"kind": "rollout", "rollout_id": 4, "step": 9, "a": 0.5, "b": 3, "c": None}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), torch.tensor(float("-inf"))])
def test_what_is_not_finite_is_null(tmp_path, value):
    MetricsLog(tmp_path).log("eval", {"a": value}, rollout_id=0, step=0)
    assert json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)["a"] is None


def test_what_is_no_number_is_refused(tmp_path):
    with pytest.raises(DataError, match="metric a: expected a number, got 'x'"):
        MetricsLog(tmp_path).log("eval", {"a": "x"}, rollout_id=0, step=0)


def test_a_resumed_run_redoes_its_lines_once(tmp_path):
    write(tmp_path, range(5))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "st')  # killed while writing
    write(tmp_path, range(3, 6), resume_rollout=3)
    assert [row["rollout_id"] for row in read_metrics(tmp_path)] == [0, 1, 2, 3, 4, 5]


def test_a_new_run_starts_empty(tmp_path):
    write(tmp_path, range(5))
    write(tmp_path, range(1))
    assert len(read_metrics(tmp_path)) == 1


@pytest.mark.parametrize("line", ["x", "5"])
def test_a_broken_line_in_the_middle_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"a": 1}}\n{line}\n{{"a": 2}}\n')
    with pytest.raises(DataError, match=rf"metrics\.jsonl:2: expected a JSON object, got '{line}'"):
        read_metrics(tmp_path)


def test_a_directory_without_metrics_is_named(tmp_path):
    with pytest.raises(DataError, match="expected a run's directory"):
        read_metrics(tmp_path)


def test_tensorboard_reads_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, range(3), tensorboard_dir=str(tmp_path / "tb"))
    write(tmp_path, range(2, 4), tensorboard_dir=str(tmp_path / "tb"), resume_rollout=2)
    events = EventAccumulator(str(tmp_path / "tb")).Reload().Scalars("train/loss")
    assert [(e.step, e.value) for e in events] == [(1, 0.0), (2, 0.5), (3, 1.0), (4, 1.5)]
