"""A rehearsal's page: what was replaced, ten lines, what could not be seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slime_ext.without_cuda.rehearsal.checks import NOT_REACHED, OK, WRONG, PageLine

STYLES = {OK: "green", WRONG: "bold red", NOT_REACHED: "yellow"}


def replaced(account: Sequence[tuple[str, str]]) -> RenderableType:
    """What stands in the place of what."""
    return Group(Text("replaced"), _table((Text(f"  {name}"), Text(text)) for name, text in account))


def result(lines: Sequence[PageLine], unseen: Sequence[str], seconds: float, log: Path) -> RenderableType:
    """The ten lines, and what no machine without a GPU shows."""
    rows = _table((Text(f"  {x.name}"), Text(x.state, STYLES.get(x.state, "")), Text(x.text)) for x in lines)
    heads = [
        Text(f"rehearsed in {seconds:.0f} s; the host's log: {log}"),
        rows,
        Text("not seen without a GPU"),
    ]
    return Group(*heads, *(Text(f"  {line}") for line in unseen))


def _table(rows: object) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for row in rows:  # type: ignore[attr-defined]
        table.add_row(*row)
    return table
