"""Whole runs against a server that answers wrongly on request: what is dropped, counted, asked again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from contextlib import ExitStack

import pytest
import torch

from slime_ext.launcher.output.metrics_log import read_metrics
from slime_ext.launcher.supervisor import claim
from tests.launcher.engine import ROOT, make_tiny_qwen3
from tests.launcher.rollout.stand_in import StandIn

pytestmark = pytest.mark.slow
FAULTS = ("positive", "outside", "too long", "abort", 500, "drop")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    directory = tmp_path_factory.mktemp("task")
    make_tiny_qwen3(directory / "model")
    rows = [json.dumps({"input": chr(51 + i) * 3, "label": "777"}) for i in range(16)]
    (directory / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    return directory


def train(task, tmp_path, url, *more, before=()):
    sizes = {
        "rollout-batch-size": 4,
        "n-samples-per-prompt": 2,
        "num-rollout": 3,
        "rollout-max-response-len": 4,
        "micro-batch-size": 4,
    }
    flags = {
        "hf-checkpoint": task / "model",
        "prompt-data": task / "prompts.jsonl",
        "label-key": "label",
        "rm-type": "characters",
        "run-dir": tmp_path,
        "run-name": "run",
        "sglang-server-url": url,
        "lr": 1e-3,
        **sizes,
    }
    words = [str(word) for flag, value in flags.items() for word in (f"--{flag}", value)]
    return subprocess.run(
        [*before, sys.executable, "-m", "slime_ext.cli", "train", *words, *more],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=240,
    )


@pytest.fixture
def server():
    running = StandIn(faults=FAULTS)
    yield running
    running.close()


def test_wrong_answers_are_dropped_and_counted_and_lost_ones_asked_again(task, tmp_path, server):
    done = train(
        task, tmp_path, server.url, "--use-tis", "--custom-tis-function-path", "slime_ext.tis.token_tis"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_metrics(tmp_path / "run")
    assert [r["rollout/dropped"] for r in rows if r["kind"] == "rollout"] == [4.0, 0.0, 0.0]
    assert all(r["train/grad_norm"] is not None for r in rows if r["kind"] == "step")
    dump = torch.load(tmp_path / "run/rollout_data/0.pt", weights_only=False)["samples"]
    dropped = [s for s in dump if s["remove_sample"]]
    assert len(dump) == 8 and len(dropped) == 4
    assert all(s["metadata"]["dropped"] and not any(s["loss_mask"]) for s in dropped)
    assert "rollout 0: 4 of 8 samples dropped (" in done.stdout and "log-prob above 0: 1" in done.stdout
    assert server.version == "3"  # the weights after the last step arrived


def one_line(done) -> str:
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    (line,) = done.stderr.strip().splitlines()
    return line


def test_a_rollout_of_which_nothing_is_left_stops_the_run(task, tmp_path, server):
    server.faults, server.always = deque([None] * 4), "all nan"
    line = one_line(train(task, tmp_path, server.url))
    assert "rollout 1: expected samples to train on, got 8 of 8 dropped (non-finite log-prob: 8)" in line


def test_a_full_disk_stops_the_run_and_the_checkpoint_before_stays(task, tmp_path, server):
    """A limit on a file's length does for a disk: the engine's weights are the largest file after a dump."""
    server.faults.clear()
    line = one_line(train(task, tmp_path, server.url, before=("prlimit", "--fsize=300000")))
    assert "--run-dir " in line and "expected room on the disk, got File too large" in line


def test_the_checkpoints_of_a_run_that_is_under_way_are_not_touched(task, tmp_path, server):
    with ExitStack() as other:
        claim(tmp_path, "--save", other)
        line = one_line(train(task, tmp_path / "runs", server.url, "--save", str(tmp_path)))
        assert f"--save: expected no other run in {tmp_path}, got one that is under way" in line


def test_a_resumed_run_makes_up_an_owed_evaluation_and_keeps_the_lag_of_its_engine(task, tmp_path, server):
    """Also under another name."""
    server.faults.clear()
    flags = ("--update-weights-interval", "3", "--eval-prompt-data", "held", str(task / "prompts.jsonl"))
    load = ("--load", str(tmp_path / "run/checkpoints"), "--run-name", "other")
    for rollouts, more in (("1", ()), ("2", load)):
        done = train(
            task, tmp_path, server.url, *flags, "--eval-interval", "1", "--num-rollout", rollouts, *more
        )
        assert done.returncode == 0, done.stdout + done.stderr
    rows = {name: read_metrics(tmp_path / name) for name in ("run", "other")}
    assert [row["step"] for row in rows["run"] if row["kind"] == "eval"] == [0, 1]
    assert [row["step"] for row in rows["other"] if row["kind"] == "eval"] == [1, 2]
    assert [row["train/staleness"] for row in rows["other"] if row["kind"] == "step"] == [1.0]
