"""Finds the files that a command changes, without running it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from slime_ext.tools.launch.trace import at

WRAPPERS = ("sudo", "srun", "nice")  # programs that run the command in their words
IN_PLACE = re.compile(r"-[a-z]*i.*|--in-?place.*")  # the option of EDITORS that makes them change a file
EDITORS = ("sed", "perl", "yq")
COPIERS = ("cp", "mv", "ln", "install", "rsync", "scp")  # their last word is the copy
REMOVERS = ("rm", "unlink", "mv")
WRITERS = ("tee", "truncate", "sponge", "shred")  # they change each file in their words
TOOLS = frozenset((*EDITORS, *COPIERS, *REMOVERS, *WRITERS))
# In any program the file that it writes follows these options.
OUTPUT = ("-o", "-O", "--out", "--output", "--output-file", "--output-document")


class Change(NamedTuple):
    """A change of a file.

    Args:
        path: the file, or a folder that holds it.
        source: the file whose text it gets; None if its text is unknown.
        is_removed: whether it is removed.
    """

    path: str
    source: str | None = None
    is_removed: bool = False


def changes(words: Sequence[str], folder: str) -> Iterator[Change]:
    """Yields the changes that a command makes.

    Args:
        folder: the folder in which it runs.

    >>> [*changes(["sed", "-i", "s/a/b/", "c.yaml"], "/x")][-1].path
    '/x/c.yaml'
    >>> [*changes(["sed", "s/a/b/", "c.yaml"], "/x")]
    []
    >>> [*changes(["python3", "make.py", "--out=c.yaml"], "/x")][0].path
    '/x/c.yaml'
    """
    if words[0] in WRAPPERS:
        words = words[next((i for i, word in enumerate(words) if word in TOOLS), 0) :]
    tool, given = Path(words[0]).name, words[1:]
    paths = [at(folder, word) for word in given if word[:1] != "-"]
    if tool in WRITERS or (tool in EDITORS and any(map(IN_PLACE.fullmatch, given))):
        yield from map(Change, paths)
    if tool in COPIERS and paths:
        for source in paths[:-1]:
            yield Change(paths[-1], source)
            yield Change(at(paths[-1], Path(source).name), source)
    if tool in REMOVERS:
        yield from (Change(path, is_removed=True) for path in (paths[:-1] if tool == "mv" else paths))
    for word, next_word in pairwise([*given, ""]):
        option, has_value, value = word.partition("=")
        if option in OUTPUT and (file := value if has_value else next_word):
            yield Change(at(folder, file))
