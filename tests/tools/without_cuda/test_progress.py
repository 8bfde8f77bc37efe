"""Rows of a run from what its host logs, in the orders in which hosts log it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from slime_ext.tools.without_cuda import progress


def logged(axis, step, **metrics):
    """A line of tracked.jsonl; a double underscore stands for a slash."""
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return json.dumps({"axis": axis, "metrics": {axis: step, **named}}) + "\n"


def sampled(step, reward=0.5):
    return logged("rollout/step", step, rollout__raw_reward=reward)


def trained(step, k3=0.001):
    return logged("train/step", step, train__off_policy__k3_kl=k3)


def timed(step):
    return logged("rollout/step", step, perf__step_time=1.0)


def held_out(step, reward):
    return logged("eval/step", step, eval__heldout=reward)


def rows_of(tmp_path, *lines, steps=1, rollouts=4):
    shown = []
    watched = progress.Progress(tmp_path, rollouts, steps, shown.append)
    (tmp_path / progress.TRACKED).write_text("".join(lines))
    watched.finish()
    return progress.read(tmp_path), shown


def test_an_evaluation_before_the_first_rollout_has_a_row_of_its_own(tmp_path):
    rows, _ = rows_of(tmp_path, held_out(0, 0.1), sampled(0), trained(0), timed(0), held_out(0, 0.3))
    assert [(row["rollout"], row["eval/heldout"]) for row in rows] == [(-1, 0.1), (0, 0.3)]


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
    for end in (10, len(whole) - 3, len(whole)):
        (tmp_path / progress.TRACKED).write_text(whole[:end])
        watched.read()
    assert watched.rows[0]["train/off_policy/k3_kl"] == [0.001]


def test_what_a_former_run_logged_is_not_read_again(tmp_path):
    (tmp_path / progress.TRACKED).write_text(sampled(0) + trained(0))
    watched = progress.Progress(tmp_path, 4, 1, print)
    with (tmp_path / progress.TRACKED).open("a") as file:
        file.write(sampled(1) + trained(1))
    watched.finish()
    assert [row["rollout"] for row in progress.read(tmp_path)] == [1]


def test_the_thread_ends_with_what_it_follows(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        progress.shown(progress.Progress(tmp_path, 1, 1, print)),
    ):
        (tmp_path / progress.TRACKED).write_text(sampled(0))
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
    assert written == {"axis": "train/step", "metrics": {"train/step": 3.0, "train/loss": 0.5}}


def test_a_release_that_logs_elsewhere_is_left_alone():
    module = SimpleNamespace(other=1)
    progress._also_write(module)
    assert vars(module) == {"other": 1}
