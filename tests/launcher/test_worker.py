"""How a training rank ends: what it leaves behind, and that it waits for nobody where it fails."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from slime_ext.errors import ConfigError
from slime_ext.launcher import loop, worker
from slime_ext.launcher.megatron import parallel


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """A rank whose run writes a dump and ends as told: exit status, whether it took leave, what it said."""
    args = {"run_path": str(tmp_path), "save": str(tmp_path / "checkpoints")}
    (tmp_path / "args.json").write_text(json.dumps(args))
    reader, writer = os.pipe()
    os.set_blocking(reader, False)

    def dump():
        time.sleep(0.1)
        (tmp_path / "dump").touch()

    def end(error):
        left = []

        class Loop(loop.Loop):
            def __init__(self, args):
                self.writer, self.writing = ThreadPoolExecutor(1), Future()
                self.writing.set_result(None)

            def run(self):
                self._write_later(dump)
                if error:
                    raise error

        monkeypatch.setattr(parallel, "initialize", lambda args, store: None)
        monkeypatch.setattr(parallel, "destroy", lambda: left.append(True))
        monkeypatch.setattr(loop, "Loop", Loop)
        status = worker.main([str(tmp_path / "args.json"), "store", str(writer)])
        with contextlib.suppress(BlockingIOError):
            return status, bool(left), os.read(reader, 4096).decode()
        return status, bool(left), ""

    yield end
    os.close(reader)
    os.close(writer)


def test_a_run_that_is_complete_takes_leave(ended):
    assert ended(None) == (0, True, "")


def test_an_error_of_the_users_is_one_line_that_nobody_waits_for(ended):
    assert ended(ConfigError("a.b: expected x, got y: change it")) == (
        2,
        False,
        "a.b: expected x, got y: change it\n",
    )


@pytest.mark.parametrize("error", [ConfigError("broken"), RuntimeError("broken")])
def test_the_dump_of_the_rollout_that_fails_is_written(ended, error, tmp_path):
    ended(error)
    assert (tmp_path / "dump").exists()


@pytest.mark.parametrize(
    "error", [RuntimeError("broken\nx"), SystemExit("broken"), KeyboardInterrupt("broken")]
)
def test_any_other_end_leaves_its_traceback_and_a_line_and_waits_for_nobody(ended, error, capsys):
    status, left, said = ended(error)
    assert (status, left) == (1, False)
    assert f"{type(error).__name__}: broken" in capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith(
        f"rank 0: expected to finish, got {type(error).__name__}: broken: see"
    )


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "x", "a.pt"), OSError(errno.EFBIG, "x"), RuntimeError("No space left on device")],
)
def test_a_full_disk_is_named_however_deep_it_lies(ended, error, tmp_path):
    outer = RuntimeError("unexpected pos 64 vs 0")
    outer.__cause__ = error
    said = ended(outer)[2]
    assert said.startswith(f"--run-dir {tmp_path}: expected room on the disk, got ") and said.count("\n") == 1
    assert said.endswith("then start again\n")
