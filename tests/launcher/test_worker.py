"""How a training rank ends: what it leaves behind, and that it waits for nobody where it fails."""

from __future__ import annotations

import json

import pytest

from slime_ext.errors import ConfigError
from slime_ext.launcher import loop, worker
from slime_ext.launcher.megatron import parallel


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """A rank whose run ends as told: its exit status, and whether it took leave of the others."""
    (tmp_path / "args.json").write_text(json.dumps({"run_path": str(tmp_path)}))

    def end(error):
        left = []

        class Loop:
            def __init__(self, args):
                pass

            def run(self):
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


@pytest.mark.parametrize("error", [RuntimeError("broken"), SystemExit("broken"), KeyboardInterrupt("broken")])
def test_any_other_end_leaves_its_traceback_and_waits_for_nobody(ended, error, capsys):
    assert ended(error) == (1, False)
    assert capsys.readouterr().err.splitlines()[-1] == f"{type(error).__name__}: broken"
