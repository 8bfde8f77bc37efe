"""Rows of a run from what its host logs, in the orders in which hosts log it."""

from __future__ import annotations

import json
import math
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from slime_ext_cpu import progress
from slime_ext_cpu.stand_ins import hosts


def logged(axis, step, **metrics):
    """A line of tracked.jsonl; a double underscore stands for a slash."""
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return json.dumps({"axis": axis, "time": time.time(), "metrics": {axis: step, **named}}) + "\n"


def sampled(step, reward=0.5):
    return logged("rollout/step", step, rollout__raw_reward=reward)


def trained(step, k3=0.001):
    return logged("train/step", step, train__off_policy__k3_kl=k3)


def timed(step):
    return logged("rollout/step", step, perf__step_time=1.0)


def held_out(step, reward):
    return logged("eval/step", step, eval__heldout=reward)


def host_logs(tmp_path, *lines):
    with (tmp_path / progress.TRACKED).open("a") as file:
        file.write("".join(lines))


def command(tmp_path, *lines, steps=1, rollouts=4, ends=True, show=lambda line: None):
    """A command that starts or resumes a run of which the host logs these lines."""
    watched = progress.Progress(tmp_path, rollouts, steps, show)
    host_logs(tmp_path, *lines)
    watched.read()
    if ends:  # or is killed
        watched.finish()


def rows_of(tmp_path, *lines, **more):
    shown = []
    command(tmp_path, *lines, show=shown.append, **more)
    return progress.read(tmp_path), shown


def test_an_evaluation_before_the_first_rollout_has_a_row_of_its_own(tmp_path):
    rows, _ = rows_of(tmp_path, held_out(0, 0.1), sampled(0), trained(0), timed(0), held_out(0, 0.3))
    assert [(row["rollout"], row["eval/heldout"]) for row in rows] == [(-1, 0.1), (0, 0.3)]


def test_both_scores_of_a_rollout_are_in_its_row(tmp_path):
    both = [
        logged("eval/step", 0, trained_eval__heldout=0.2),
        sampled(0),
        trained(0),
        timed(0),
        held_out(0, 0.3),
    ]
    rows, shown = rows_of(
        tmp_path, held_out(0, 0.1), *both, logged("eval/step", 0, trained_eval__heldout=0.4)
    )
    found = [(row["rollout"], row["eval/heldout"], row[progress.HELDOUT_TRAINED]) for row in rows]
    assert found == [(-1, 0.1, 0.2), (0, 0.3, 0.4)]
    assert shown[-1] == "held-out reward 0.400 with the trainer's weights"


def test_optimizer_steps_of_a_rollout_are_averaged(tmp_path):
    lines = [sampled(0), *(trained(step, k3) for step, k3 in enumerate((1.0, 3.0))), timed(0), sampled(1)]
    rows, _ = rows_of(tmp_path, *lines, trained(2, 5.0), trained(3, 7.0), steps=2)
    assert [row["train/off_policy/k3_kl"] for row in rows] == [2.0, 6.0]


def test_a_rollout_that_is_sampled_early_keeps_its_own_row(tmp_path):
    """As train_async.py logs it."""
    lines = [sampled(0, 0.1), sampled(1, 0.2), trained(0), timed(0), held_out(0, 0.9), trained(1), timed(1)]
    rows, _ = rows_of(tmp_path, *lines)
    assert [(row["rollout"], row["rollout/raw_reward"]) for row in rows] == [(0, 0.1), (1, 0.2)]
    assert rows[0]["eval/heldout"] == 0.9


def test_a_line_on_the_screen_has_rollout_numbers_and_time_left(tmp_path):
    _, shown = rows_of(tmp_path, sampled(2, 0.25), trained(2, 0.001), timed(2))
    assert [line.split("  ")[:3] for line in shown] == [["rollout 3/4", "reward 0.25", "k3 0.001"]]
    assert shown[0].endswith(" s left")


def test_a_line_that_is_still_being_written_waits(tmp_path):
    watched = progress.Progress(tmp_path, 4, 1, print)
    whole = sampled(0) + trained(0)
    for begin, end in pairwise((0, 10, len(whole) - 3, len(whole))):
        host_logs(tmp_path, whole[begin:end])
        watched.read()
    assert watched.rows.by_rollout[0].metrics["train/off_policy/k3_kl"] == [0.001]


def rollout(number, reward=0.5, k3=0.001):
    return sampled(number, reward) + trained(number, k3) + timed(number)


def rewards(tmp_path):
    return [(row["rollout"], row["rollout/raw_reward"]) for row in progress.read(tmp_path)]


def test_a_kill_loses_no_row(tmp_path):
    """metrics.jsonl lacked the last one, and the next command did not read what was logged before it."""
    command(tmp_path, *map(rollout, range(3)), ends=False)
    assert [number for number, _ in rewards(tmp_path)] == [0, 1]
    command(tmp_path, rollout(3), ends=False)
    assert [number for number, _ in rewards(tmp_path)] == [0, 1, 2]
    command(tmp_path)
    assert [number for number, _ in rewards(tmp_path)] == [0, 1, 2, 3]


def test_a_rollout_that_is_trained_again_has_one_row(tmp_path):
    """The trainer was killed in rollout 3, and the last checkpoint is of rollout 1."""
    command(tmp_path, held_out(0, 0.1), *map(rollout, range(3)), sampled(3, 0.0))
    command(tmp_path, rollout(2, 0.6), rollout(3, 0.7), ends=False)
    command(tmp_path, rollout(3, 0.8), rollout(4, 0.9))
    rows = progress.read(tmp_path)
    assert [row["rollout"] for row in rows] == [-1, 0, 1, 2, 3, 4]
    assert [row["rollout/raw_reward"] for row in rows[3:]] == [0.6, 0.8, 0.9]
    assert rows[0]["eval/heldout"] == 0.1


def test_a_kill_before_the_first_row_of_a_resumed_run_loses_none(tmp_path):
    command(tmp_path, *map(rollout, range(3)))
    for _ in range(2):
        command(tmp_path, ends=False)
    assert [number for number, _ in rewards(tmp_path)] == [0, 1, 2]


def test_rows_of_another_release_stay(tmp_path):
    """Its tracked.jsonl does not say when a command began."""
    (tmp_path / progress.METRICS).write_text('{"rollout": 0, "a": NaN}\n{"rollout": 1, "a": 2.0}\n')
    (tmp_path / progress.TRACKED).write_text(
        '{"axis": "train/step", "metrics": {"train/step": 0, "a": 9.0}}\n'
    )
    command(tmp_path, rollout(1))
    assert [(row["rollout"], row.get("a")) for row in progress.read(tmp_path)][1:] == [(1, None)]


def test_seconds_are_of_the_rows_own_command(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    for began, number in ((100.0, 0), (200.0, 1)):
        now[0] = began
        watched = progress.Progress(tmp_path, 4, 1, print)  # writes the row of the command before
        now[0] += 5 + number
        host_logs(tmp_path, rollout(number))
    watched.finish()
    found = [(row["rollout"], row["time"], row["seconds"]) for row in progress.read(tmp_path)]
    assert found == [(0, 105.0, 5.0), (1, 206.0, 6.0)]


def test_a_line_that_a_full_disk_cut_is_passed_over(tmp_path):
    """Both files could never be read again."""
    command(tmp_path, rollout(0), sampled(1)[:-20])
    with (tmp_path / progress.METRICS).open("a") as file:
        file.write('{"rollout": 1, "rollout/raw_r')
    assert [number for number, _ in rewards(tmp_path)] == [0]
    command(tmp_path, rollout(1), rollout(2)[:-30])
    assert [number for number, _ in rewards(tmp_path)] == [0, 1, 2]
    assert all(json.loads(line) for line in (tmp_path / progress.METRICS).read_text().splitlines())


def test_a_row_that_finds_no_room_is_written_when_there_is_some(tmp_path):
    watched = progress.Progress(tmp_path, 4, 1, print)
    host_logs(tmp_path, *map(rollout, range(3)))
    (tmp_path / progress.METRICS).mkdir()
    for attempt in (watched.read, watched.finish):
        with pytest.raises(OSError, match="Is a directory"):
            attempt()
    (tmp_path / progress.METRICS).rmdir()
    watched.finish()
    assert [number for number, _ in rewards(tmp_path)] == [0, 1, 2]


def test_a_line_that_comes_late_belongs_to_its_row(tmp_path):
    lines = [rollout(0), rollout(1), logged("rollout/step", 0, perf__late=1.0), rollout(2)]
    rows, _ = rows_of(tmp_path, *lines)
    assert [(row["rollout"], row.get("perf/late")) for row in rows] == [(0, 1.0), (1, None), (2, None)]


def test_a_screen_without_a_reader_takes_no_row(tmp_path):
    def closed(line):
        raise BrokenPipeError(32, "Broken pipe")

    command(tmp_path, *map(rollout, range(3)), held_out(2, 0.5), show=closed)
    assert [number for number, _ in rewards(tmp_path)] == [0, 1, 2]
    assert progress.read(tmp_path)[2]["eval/heldout"] == 0.5


def test_a_number_that_is_not_finite_is_null_in_both_files(tmp_path, monkeypatch):
    monkeypatch.setenv(progress.FILE, str(tmp_path / progress.TRACKED))
    module = SimpleNamespace(log=lambda args, metrics, step_key: None)
    progress._also_write(module)
    watched = progress.Progress(tmp_path, 4, 2, print)
    module.log(None, {"train/step": 0, "a": math.nan, "b": 1.0, "c": torch.tensor(math.inf)}, "train/step")
    module.log(None, {"train/step": 1, "a": 2.0, "b": 3.0, "c": 4.0}, "train/step")
    watched.finish()
    for name in (progress.TRACKED, progress.METRICS):
        for line in (tmp_path / name).read_text().splitlines():
            json.loads(line, parse_constant=pytest.fail)
    (row,) = progress.read(tmp_path)
    assert (row["a"], row["b"], row["c"]) == (None, 2.0, None)


def test_the_thread_ends_with_what_it_follows(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        progress.following(progress.Progress(tmp_path, 1, 1, print)),
    ):
        host_logs(tmp_path, sampled(0))
        raise KeyboardInterrupt
    assert len(progress.read(tmp_path)) == 1


def test_numbers_are_written_and_the_host_logs_all(tmp_path, monkeypatch):
    calls = []
    module = SimpleNamespace(log=lambda args, metrics, step_key: calls.append((metrics, step_key)))
    monkeypatch.setenv(progress.FILE, str(tmp_path / "tracked.jsonl"))
    progress._also_write(module)
    metrics = {"train/step": 3, "train/loss": torch.tensor(0.5), "train/picture": object()}
    module.log(None, metrics, "train/step")
    assert calls == [(metrics, "train/step")]
    written = json.loads((tmp_path / "tracked.jsonl").read_text())
    assert time.time() - 60 < written.pop("time") <= time.time() + 1
    assert written == {"axis": "train/step", "metrics": {"train/step": 3.0, "train/loss": 0.5}}


def test_a_score_of_unrounded_weights_has_a_name_of_its_own(tmp_path, monkeypatch):
    calls = []
    module = SimpleNamespace(log=lambda args, metrics, step_key: calls.append(metrics))
    monkeypatch.setenv(progress.FILE, str(tmp_path / "tracked.jsonl"))
    monkeypatch.setenv(hosts.UNROUNDED, str(tmp_path / "unrounded"))
    progress._also_write(module)
    metrics = {"eval/heldout": 0.5, "eval/step": 3}
    module.log(None, metrics, "eval/step")
    with hosts.unrounded():
        module.log(None, metrics, "eval/step")
    lines = [json.loads(line)["metrics"] for line in (tmp_path / "tracked.jsonl").read_text().splitlines()]
    assert lines == [metrics, {progress.HELDOUT_TRAINED: 0.5, "eval/step": 3.0}]
    assert calls == [metrics]  # the host's own log has one score per name


def test_a_release_that_logs_elsewhere_is_left_alone():
    module = SimpleNamespace(other=1)
    progress._also_write(module)
    assert vars(module) == {"other": 1}
