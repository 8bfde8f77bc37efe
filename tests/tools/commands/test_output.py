"""What the commands share when they write."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Group
from rich.text import Text

from slime_ext.errors import ConfigError
from slime_ext.tools.commands import cli, output
from slime_ext.tools.folders import make_folder


def test_no_folder_is_made_at_the_root(tmp_path):
    with pytest.raises(ConfigError, match="got none at /no_such_folder_here: check whether each variable"):
        make_folder(Path("/no_such_folder_here/a/b"))
    make_folder(tmp_path / "a/b")
    assert (tmp_path / "a/b").is_dir() and not Path("/no_such_folder_here").exists()


def test_nothing_that_is_printed_controls_the_terminal(capsys, tmp_path):
    name = "run\x1b[31m\u202ered.sh"
    (tmp_path / name).write_text("python3 train.py --lr 1\n")
    assert cli.main(["check", str(tmp_path / name)]) == 1  # a trace of bash cannot hold such a name
    out = capsys.readouterr().err
    assert "\x1b" not in out and "\u202e" not in out and "run\\x1b[31m\\u202ered.sh" in out
    output.console().print(
        output.table([["a\x1b", Text("b\x9b", "red")]]), Group(Text("c\x00")), "d\u2066", markup=False
    )
    assert capsys.readouterr().out.split() == ["a\\x1b", "b\\x9b", "c\\x00", "d\\u2066"]


def test_a_word_between_colons_stays_that_word(capsys):
    screen = output.console()
    screen.print("[bold]run:fire:1[/bold]")
    screen.print("run:fire:2", markup=False)
    screen.print(output.table([["run:fire:3"]]))
    assert capsys.readouterr().out.split() == ["run:fire:1", "run:fire:2", "run:fire:3"]
