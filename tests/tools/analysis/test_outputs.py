"""What analyze and report write: whole files at their own place, with no character that hides others."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from slime_ext.errors import ConfigError
from slime_ext.tools.analysis.page.page import render, write_report
from slime_ext.tools.commands.cli import main
from slime_ext.tools.folders import write_file
from tests.tools.analysis import dumps
from tests.tools.analysis.documents import document
from tests.tools.analysis.synthetic import World, run

HIDDEN = "\u202e\u2066\x1b\x9b\u200f"


def test_a_link_is_refused_and_its_target_stays(tmp_path, capsys):
    folder = dumps.write_run(tmp_path / "run", run(World(rollouts=1, samples=4, length=8)))
    target = tmp_path / "precious"
    for flag in ("--out", "--json"):
        target.write_text("mine")
        link = tmp_path / f"link{flag}"
        for leads_to in (target, tmp_path / "new"):
            link.unlink(missing_ok=True)
            link.symlink_to(leads_to)
            assert main(["analyze", str(folder), flag, str(link)]) == 2
            said = capsys.readouterr().err
            assert f"expected a file, got a link to {leads_to}" in said and said.count("\n") == 1
        assert target.read_text() == "mine" and not (tmp_path / "new").exists() and link.is_symlink()


def test_every_writer_refuses_a_link_that_appears_late(tmp_path):
    target, link = tmp_path / "target", tmp_path / "page.html"
    target.write_text("mine")
    link.symlink_to(target)
    with pytest.raises(ConfigError, match="got a link to"):
        write_report(document(), link)
    assert target.read_text() == "mine"


def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("before")
    path.chmod(0o640)
    other = tmp_path / "hard"
    os.link(path, other)
    write_file(path, "after")
    assert path.read_text() == "after" and path.stat().st_mode & 0o777 == 0o640
    assert other.read_text() == "before"  # another name of what was there
    monkeypatch.setattr("pathlib.Path.replace", lambda self, to: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        write_file(path, "lost")
    assert path.read_text() == "after" and sorted(p.name for p in tmp_path.iterdir()) == ["hard", "page.html"]


def test_a_pipe_is_written_into(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_file(pipe, "said")
    assert os.read(reader, 10) == b"said"
    os.close(reader)


def test_characters_that_hide_others_are_shown_on_the_page_and_on_the_terminal(tmp_path, capsys):
    page = render(replace(document(), name=f"run{HIDDEN}", paths=(f"/x{HIDDEN}",)))
    assert not set(HIDDEN) & set(page) and r"run\u202e\u2066\x1b\x9b\u200f" in page
    folder = tmp_path / f"a{HIDDEN}"
    dumps.write_run(folder, run(World(rollouts=1, samples=4, length=8)))
    assert main(["analyze", str(folder), "--out", str(tmp_path / "page.html")]) == 0
    printed = capsys.readouterr()
    assert not set(HIDDEN) & set(printed.out + printed.err + (tmp_path / "page.html").read_text())
