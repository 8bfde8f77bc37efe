"""``presets`` on terminals of any width."""

from __future__ import annotations

from rich.console import Console

from slime_ext import presets
from slime_ext.tools.commands import cli
from slime_ext.tools.commands import presets as command


def test_everything_is_there_at_any_width(monkeypatch, capsys):
    sources = {preset.source.split(", http")[0] for preset in presets.PRESETS.values()}
    for width in (80, 100, 200):
        monkeypatch.setattr(command, "console", lambda width=width: Console(width=width))
        assert cli.main(["presets"]) == 0
        out = capsys.readouterr().out
        words = out.split()
        assert all(name in words for name in (*presets.PRESETS, *presets.ALIASES)) and "…" not in out
        assert all(word in words for source in sources for word in source.split())
        assert max(map(len, out.splitlines())) <= width
