"""The pictures of docs/analyze.md: which there are, and that the parts of a page that they show exist."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

from benchmarks.faults import pictures
from benchmarks.faults.__main__ import toy
from slime_ext.tools.commands import cli

ROOT = Path(__file__).parents[2]


def test_the_pictures_are_those_of_the_page():
    shown = re.findall(r"\]\(img/(\w+)\.png\)", (ROOT / "docs/analyze.md").read_text())
    assert sorted(shown) == sorted(pictures.PICTURES)


def test_the_runs_of_a_picture_are_made():
    made = {f"{name}_{seed}" for name, seed in pictures.RUNS}
    assert {run for picture in pictures.PICTURES.values() for run in picture.runs} == made


def test_the_parts_are_on_the_page(tmp_path, capsys):
    toy(tmp_path, ["healthy"], 1)
    assert cli.main(["analyze", str(tmp_path / "healthy_1"), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    for name, picture in pictures.PICTURES.items():
        for part in re.findall(r"#([\w-]+)", picture.hides):
            assert f'id="{part}"' in page, (name, part)
    assert 'class="pictures"' in page


def test_the_background_is_cut_off():
    ran = doctest.testmod(pictures)
    assert ran.attempted and not ran.failed
