"""What the parent of a run does before anything is started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks import tiny_task as tiny
from slime_ext.errors import ConfigError, EngineError, SlimeExtError
from slime_ext.launcher import supervisor
from tests.launcher.engine import ROOT


def arguments(tmp_path: Path, **more: object) -> Namespace:
    places = {"run_path": "run", "save": "run/save", "tensorboard_dir": "run/events"}
    values = {name: str(tmp_path / path) for name, path in places.items()}
    dumps = {"save_debug_rollout_data": None, "save_debug_train_data": None}
    return Namespace(**{**values, **dumps, **more})


def test_directories_are_made(tmp_path):
    supervisor.make_directories(arguments(tmp_path))
    assert all((tmp_path / name).is_dir() for name in ("run", "run/save"))


@pytest.mark.parametrize(
    ("name", "flag"),
    [("run_path", "--run-dir"), ("save", "--save")],
)
def test_a_directory_that_cannot_be_made_is_named(tmp_path, name, flag):
    (tmp_path / "file").write_text("")
    path = f"{tmp_path}/file/x"
    with pytest.raises(ConfigError, match=f"{flag} .*file/x: expected a directory that can be written"):
        supervisor.make_directories(arguments(tmp_path, **{name: path}))


def test_only_an_engine_of_our_own_has_the_time_of_a_start_to_come_back():
    assert supervisor.patience(Namespace(sglang_server_url=None, sglang_start_timeout=300.0)) == 300
    assert supervisor.patience(Namespace(sglang_server_url="http://a:1", sglang_start_timeout=300.0)) == 60


def test_two_runs_do_not_share_a_directory(tmp_path):
    with ExitStack() as first, ExitStack() as second:
        supervisor.claim(tmp_path, "--save", first)
        with pytest.raises(ConfigError, match="--save: expected no other run in"):
            supervisor.claim(tmp_path, "--save", second)
    with ExitStack() as again:
        supervisor.claim(tmp_path, "--save", again)


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with os.fdopen(reader) as errors, os.fdopen(writer, "wb", buffering=0) as said:
        yield errors, said


def test_an_engine_that_may_not_be_restarted_ends_the_run(tmp_path, pipe):
    rank = Namespace(poll=lambda: None)
    engine = Namespace(failure=EngineError("gone"), restarts=0)
    with pytest.raises(EngineError, match="gone"):
        supervisor.watch([rank], engine, pipe[0], arguments(tmp_path))


def test_what_the_first_rank_that_failed_said_is_the_reason(tmp_path, pipe):
    """The others fail within milliseconds, because it did."""
    rank = Namespace(poll=lambda: 1, returncode=1)
    pipe[1].write(b"rank 1: no\nrank 0: Connection reset by peer\n")
    with pytest.raises(SlimeExtError, match=r"^rank 1: no$"):
        supervisor.watch([rank, rank], None, pipe[0], arguments(tmp_path))


def test_a_rank_that_was_killed_said_nothing(tmp_path, pipe):
    ranks = [Namespace(poll=lambda: 0), Namespace(poll=lambda: -9, returncode=-9)]
    with pytest.raises(
        SlimeExtError, match=r"rank 1: .* got killed by signal 9: see .*rank_1.log, then start"
    ):
        supervisor.watch(ranks, None, pipe[0], arguments(tmp_path))


SWALLOWS = """
import pathlib, time
pathlib.Path("ready").touch()
try:
    time.sleep(60)
except KeyboardInterrupt:
    pass
def tis(**call): ...
"""


def test_an_interrupt_ends_a_command_that_still_imports(tmp_path):
    tiny.write_all(tmp_path)
    (tmp_path / "mine.py").write_text(SWALLOWS)
    line = (
        "train --hf-checkpoint model --prompt-data train.jsonl --label-key label --rm-type exact "
        "--num-rollout 1 "
        "--rollout-batch-size 4 --rollout-max-response-len 8 --sglang-server-url http://127.0.0.1:9 "
        "--use-tis --custom-tis-function-path mine.tis"
    )
    command = [sys.executable, "-m", "slime_ext.cli", *line.split()]
    process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
