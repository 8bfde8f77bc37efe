"""``slime-ext report``: a picture of its own, or one line that says what is missing."""

from __future__ import annotations

from slime_ext.tools.commands import cli
from tests.tools.report.test_run_picture import slime_run


def test_the_picture_is_written_where_it_is_asked_for(tmp_path, capsys):
    run = slime_run(tmp_path / "run")
    assert cli.main(["report", str(run), "--out", str(tmp_path / "new/a.png")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "new/a.png")
    assert (tmp_path / "new/a.png").read_bytes().startswith(b"\x89PNG")


def test_a_mistake_is_one_line(tmp_path, capsys):
    run = slime_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    for words, said in (
        ([str(tmp_path / "gone")], "expected the folder of a run, got none"),
        ([str(run), "--out", "picture.txt"], "--out: expected a name that ends in .png, .pdf, .svg"),
        ([str(run), "--out", str(tmp_path / "file/x.png")], "expected a folder to write to, got a file"),
        ([str(run), "--out", "/nowhere_at_all/x.png"], "expected a folder below one that exists"),
        ([str(run), "--labels", "a", "b"], "--labels: expected 1 names, got 2"),
    ):
        assert cli.main(["report", *words]) == 2, words
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1, error
