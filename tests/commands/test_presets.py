"""``presets`` on terminals of any width."""

from __future__ import annotations

import pytest
from rich.console import Console

from slime_ext import cli, presets
from slime_ext.commands import presets as command


@pytest.mark.parametrize(("width", "has_source"), [(80, False), (100, False), (200, True)])
def test_every_name_is_whole_at_any_width(monkeypatch, capsys, width, has_source):
    monkeypatch.setattr(command, "console", lambda: Console(width=width))
    assert cli.main(["presets"]) == 0
    out = capsys.readouterr().out
    words = out.split()
    assert all(name in words for name in (*presets.PRESETS, *presets.ALIASES)) and "…" not in out
    assert ("source" in words[:6]) is has_source and max(map(len, out.splitlines())) <= width
