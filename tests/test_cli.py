"""The command line: light at start, one line and exit status 2 for a user's mistake."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slime_ext import cli
from slime_ext.errors import ConfigError

HEAVY = ("torch", "pydantic", "rich", "numpy", "yaml", "transformers")


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from slime_ext import cli; cli.main(['--help']);"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


def test_help_names_every_command(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)


def _command(monkeypatch, function):
    module = type(sys)("stand_in")
    module.main = function
    monkeypatch.setitem(sys.modules, "stand_in", module)
    monkeypatch.setitem(cli.COMMANDS, "stand-in", ("stand_in:main", "for this test"))


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (3, 3)])
def test_a_command_gets_its_flags_and_gives_the_status(monkeypatch, returned, status):
    seen = []
    _command(monkeypatch, lambda argv: seen.append(argv) or returned)
    assert cli.main(["stand-in", "--flag", "1"]) == status
    assert seen == [["--flag", "1"]]


def test_a_users_mistake_is_one_line_on_stderr(monkeypatch, capsys):
    def fail(argv):
        raise ConfigError("--lr: expected a number, got 'x'")

    _command(monkeypatch, fail)
    assert cli.main(["stand-in"]) == 2
    assert capsys.readouterr() == ("", "slime-ext: --lr: expected a number, got 'x'\n")


def test_ctrl_c_is_130(monkeypatch):
    def interrupt(argv):
        raise KeyboardInterrupt

    _command(monkeypatch, interrupt)
    assert cli.main(["stand-in"]) == 130


def test_a_mistyped_command_names_the_nearest(capsys):
    assert cli.main(["trian"]) == 2
    assert "did you mean 'train'?" in capsys.readouterr().err
