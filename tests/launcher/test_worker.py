"""How a training rank ends: what it leaves behind, and that it waits for nobody where it fails."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from slime_ext.errors import ConfigError
from slime_ext.launcher import loop, worker
from slime_ext.launcher.megatron import parallel


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """A rank whose run writes a dump and ends as told: its exit status, and whether it took leave."""
    (tmp_path / "args.json").write_text(json.dumps({"run_path": str(tmp_path)}))

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

        monkeypatch.setattr(parallel, "initialize", lambda args: None)
        monkeypatch.setattr(parallel, "destroy", lambda: left.append(True))
        monkeypatch.setattr(loop, "Loop", Loop)
        return worker.main([str(tmp_path / "args.json")]), bool(left)

    return end


def test_a_run_that_is_complete_takes_leave(ended):
    assert ended(None) == (0, True)


def test_an_error_of_the_users_is_one_line_that_nobody_waits_for(ended, tmp_path):
    assert ended(ConfigError("a.b: expected x, got y: change it")) == (2, False)
    assert (tmp_path / worker.ERROR_FILE).read_text() == "a.b: expected x, got y: change it\n"


@pytest.mark.parametrize("error", [ConfigError("broken"), RuntimeError("broken")])
def test_the_dump_of_the_rollout_that_fails_is_written(ended, error, tmp_path):
    ended(error)
    assert (tmp_path / "dump").exists()


@pytest.mark.parametrize("error", [RuntimeError("broken"), SystemExit("broken"), KeyboardInterrupt("broken")])
def test_any_other_end_leaves_its_traceback_and_waits_for_nobody(ended, error, capsys):
    assert ended(error) == (1, False)
    assert capsys.readouterr().err.splitlines()[-1] == f"{type(error).__name__}: broken"
