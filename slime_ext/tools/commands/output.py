"""Prints the output of the commands: with rich on a terminal, as plain text elsewhere."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from slime_ext.errors import printable

INLINE = 88
COLUMNS, WIDE = 80, 200  # characters of a line outside a terminal: of a table, and of a table of messages
PADDING = re.compile(r"[ ]+$", re.MULTILINE)


class PlainConsole(Console):
    """Prints text that cannot control the terminal, and outside a terminal no spaces at the ends of lines.

    The name of a file or a user's data can contain control characters, or characters that change the
    direction of writing. Each of them is shown as its escape.
    """

    @property
    def wraps(self) -> bool:
        """Whether lines of prose end at the console's width: on a terminal, or where COLUMNS says how wide.

        Elsewhere each is one line, which a program can search.
        """
        return self.is_terminal or named_width() is not None

    def print(self, *objects: Any, **options: Any) -> None:
        if self.is_terminal:
            super().print(*map(plain, objects), **options)
            return
        with self.capture() as captured:
            super().print(*map(plain, objects), **options)
        self.file.write(PADDING.sub("", captured.get()))
        self.file.flush()


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


def named_width() -> int | None:
    """Returns the width that the variable COLUMNS names."""
    named = os.environ.get("COLUMNS", "")
    return int(named) if named.isdecimal() else None


def console(*, stderr: bool = False, width: int = COLUMNS) -> PlainConsole:
    """Returns a console that shows ``:fire:`` as written, because it may be a part of a user's path.

    Outside a terminal it is as wide as the variable COLUMNS says.

    Args:
        width: characters outside a terminal without COLUMNS.
    """
    terminal = PlainConsole(highlight=False, emoji=False, stderr=stderr)
    if terminal.is_terminal:
        return terminal
    return PlainConsole(highlight=False, emoji=False, stderr=stderr, width=named_width() or width)


def table(rows: Iterable[Sequence[str | Text]], header: Sequence[str] = ()) -> Table:
    """Returns a table without lines. Brackets in a text are shown, not read as rich's markup."""
    grid = Table(*header, box=None, show_header=bool(header), pad_edge=False)
    for row in rows:
        grid.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return grid


def yaml_of(value: Any) -> str:
    """Returns YAML in the order of the mapping, with small mappings on one line."""
    import yaml  # most commands write none

    text: str = yaml.safe_dump(value, sort_keys=False, default_flow_style=None, width=INLINE)
    return text.rstrip()
