"""What the sub-commands print: rich on a terminal, plain text anywhere else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import yaml
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from slime_ext.errors import printable

INLINE = 88


class PlainConsole(Console):
    """Prints text in which nothing controls the terminal: a control character or a change of the direction of
    writing, in a name of a file or in somebody's data, is shown as its escape."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*map(plain, objects), **options)


def plain(printed: Any) -> Any:
    """What is printed, each of its texts in printable characters alone; its line ends stay."""
    if isinstance(printed, str):
        return "\n".join(map(printable, printed.split("\n")))
    if isinstance(printed, Text):
        same = printed.plain == (text := plain(printed.plain))
        return printed if same else Text(text, printed.style)
    if isinstance(printed, Group):
        return Group(*map(plain, printed.renderables))
    if isinstance(printed, Table):
        for column in printed.columns:
            column._cells = list(map(plain, column._cells))
    return printed


def console(*, stderr: bool = False) -> Console:
    """Wide enough for a pipe to keep one line per row."""
    found = PlainConsole(highlight=False, stderr=stderr)
    return found if found.is_terminal else PlainConsole(highlight=False, stderr=stderr, width=200)


def table(rows: Iterable[Sequence[str | Text]], header: Sequence[str] = ()) -> Table:
    """Rows of cells without lines between them; text is shown as it is, whatever brackets it has."""
    found = Table(*header, box=None, show_header=bool(header), pad_edge=False)
    for row in rows:
        found.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return found


def yaml_of(value: Any) -> str:
    """YAML in the order of the mapping, small mappings on one line."""
    return yaml.safe_dump(value, sort_keys=False, default_flow_style=None, width=INLINE).rstrip()
