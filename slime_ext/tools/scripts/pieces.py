"""Parts of a word before it is split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from slime_ext.tools.scripts.values import Unknown, Value

if TYPE_CHECKING:
    from tree_sitter import Node


class RefusedError(Exception):
    """An expansion that bash refuses, without which it does not start the command."""


class Kind(Enum):
    """How a piece came into a word: written there, written in quotes, put in."""

    WRITTEN = 0
    QUOTED = 1
    PUT_IN = 2


@dataclass(frozen=True)
class Piece:
    """A part of a word before it is split; ``ends`` says that a new word begins behind it."""

    part: str | Unknown
    kind: Kind
    ends: bool = False


def touching(nodes: Sequence[Node]) -> Iterator[list[Node]]:
    """Nodes in groups that no blank parts, each of which is one word."""
    group: list[Node] = []
    for node in nodes:
        if group and node.start_byte > group[-1].end_byte:
            yield group
            group = []
        group.append(node)
    if group:
        yield group


def is_unset(word: Value) -> bool:
    return bool(word) and all(isinstance(part, Unknown) and part.unset for part in word)
