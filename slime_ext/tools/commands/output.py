"""Prints the output of the commands: with rich on a terminal, as plain text elsewhere."""

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
    """Prints text that cannot control the terminal.

    The name of a file or a user's data can contain control characters, or characters that change the
    direction of writing. Each of them is shown as its escape.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*map(plain, objects), **options)


def plain(printed: Any) -> Any:
    """Escapes all unprintable characters except line ends in a text, a table or a group."""
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
    """Returns a console. Outside a terminal it is wide, so that a row of a table stays on one line."""
    terminal = PlainConsole(highlight=False, stderr=stderr)
    return terminal if terminal.is_terminal else PlainConsole(highlight=False, stderr=stderr, width=200)


def table(rows: Iterable[Sequence[str | Text]], header: Sequence[str] = ()) -> Table:
    """Returns a table without lines. Brackets in a text are shown, not read as rich's markup."""
    grid = Table(*header, box=None, show_header=bool(header), pad_edge=False)
    for row in rows:
        grid.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return grid


def yaml_of(value: Any) -> str:
    """Returns YAML in the order of the mapping, with small mappings on one line."""
    return yaml.safe_dump(value, sort_keys=False, default_flow_style=None, width=INLINE).rstrip()
