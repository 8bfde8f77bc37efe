"""Launch scripts as a shell reads them, as far as they can be read without running them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from slime_ext.errors import ConfigError
from slime_ext.mappings import text_of

ASSIGNMENT = re.compile(
    r"^\s*(?:(?:export|readonly|local|declare)\s+)?(\w+)=(\"[^\"]*\"|'[^']*'|[^\s;]*)\s*;?(?:\s*#.*)?$"
)
REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?[-=]([^{}]*))?\})")
KEPT = re.compile(r"\$\{(\w+):?=([^{}]*)\}")  # a default that stays
UNKNOWN = re.compile(r"[$`]")  # what only a shell knows
COMMENT = re.compile(r"""(\\.|'[^']*'|"(?:\\.|[^"\\])*")|(?:^|(?<=\s))#.*""")
ARRAY = re.compile(r"^(\w+)\+?=\(")
SLIME, EMBEDDED = "slime", "slime-ext train"
LAUNCHES = {"train.py": SLIME, "train_async.py": SLIME, "slime-ext": EMBEDDED}
PYTHON = ".py"  # of miles: run with launcher utilities that only note commands
SCRIPT = (".sh", ".bash", ".zsh", ".ksh", ".slurm", ".sbatch", PYTHON, "")
MAPPING = (".yaml", ".yml", ".json")
SAYS = ("echo", "printf")  # what a script only says
ELSEWHERE = set(";|&>")  # what may send it elsewhere
OUTPUT = re.compile(r"\$\((?:[^()\"']|\([^()\"']*\))*\)")  # of a command, or a sum: one word
BLANK = "\x1f"  # a space in it
QUOTED = 100  # lines that one quote may span
NESTED = 5  # defaults in defaults


def is_script(path: str) -> bool:
    """Whether a file is a launch script rather than a mapping."""
    suffix = Path(path).suffix
    return suffix in SCRIPT or (suffix not in MAPPING and _names_a_shell(path))


def _names_a_shell(path: str) -> bool:
    try:
        with Path(path).open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def launcher_of(path: str) -> str | None:
    """Which launcher a script starts; None for a YAML file, and for a script that starts neither."""
    if Path(path).suffix == PYTHON:
        return SLIME
    words = words_of(path, text_of(path)) if is_script(path) else ()
    return next((LAUNCHES[name] for name in (Path(word).name for word in words) if name in LAUNCHES), None)


def words_of(path: str, text: str) -> list[str]:
    """Shell words of a script without comments and array brackets; variables that are known replaced."""
    return [_bare(word) for word in _words(path, text)]


def forbid_unused_arrays(path: str, text: str, acts: Callable[[str], bool]) -> None:
    """Stops at an array of flags that a script with a launch never looks at.

    Args:
        acts: whether a flag is one that has to reach the launch.

    Raises:
        ConfigError: naming the array.
    """
    words = _words(path, text)
    if not any(Path(_bare(word)).name in LAUNCHES for word in words):
        return
    said = "\n".join(lines_of(text))
    for name in dict.fromkeys(name for name, word in _array_words(words) if acts(word.partition("=")[0])):
        if not re.search(rf"\b{name}\b(?!\+?=)", said):
            raise ConfigError(
                f'{path}: {name}: expected "${{{name}[@]}}" in the launch, got none: its flags reach nothing'
            )


def _array_words(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(array, word) for what lies in the brackets of an array."""
    name = ""
    for word in words:
        if match := ARRAY.match(word):
            name = match[1]
        if name:
            yield name, _bare(word)
        if word.endswith((")", ");")):
            name = ""


def _bare(word: str) -> str:
    return ARRAY.sub("", word).lstrip("(").rstrip(");")


def _words(path: str, text: str) -> list[str]:
    known = _variables(path, text)
    lines = [_substituted(line, known) for line in lines_of(text)]
    return [word for words in commands_of(lines) for word in words]


def lines_of(text: str) -> list[str]:
    """Lines with those that go on joined, without comments."""
    joined = text.replace("\\\n", " ").splitlines()
    return [COMMENT.sub(lambda match: match[1] or "", line) for line in joined]


def commands_of(lines: Sequence[str]) -> Iterator[list[str]]:
    """Shell words of each line; a quote is read to its end, a line with one that has no end is left out."""
    begin = 0
    while begin < len(lines):
        begin, words = begin + 1, []
        for stop in range(begin, min(begin + QUOTED, len(lines) + 1)):
            try:
                words = shlex.split(
                    OUTPUT.sub(lambda m: m[0].replace(" ", BLANK), "\n".join(lines[begin - 1 : stop]))
                )
            except ValueError:
                continue
            words = [word.replace(BLANK, " ") for word in words]
            begin = stop
            break
        if words and not _is_said(words):
            yield words


def _is_said(words: Sequence[str]) -> bool:
    return bool(words) and words[0] in SAYS and not ELSEWHERE & set("".join(words))


def _variables(path: str, text: str) -> dict[str, str]:
    """What the script assigns to names, each value with the names before it put in."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if match := ASSIGNMENT.match(line):
            name, value = match[1], match[2].strip("\"'")
            found[name] = _substituted(value, found)
        elif "BASH_SOURCE" in line and "=" in line:  # its own folder, the way slime's scripts find it
            found[line.partition("=")[0].split()[-1]] = str(Path(path).resolve().parent)
        for name, default in KEPT.findall(line):
            found.setdefault(name, os.environ.get(name) or default)
    return found


def _substituted(text: str, known: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[2], match[3]
        return known.get(name) or os.environ.get(name) or (match[0] if default is None else default)

    for _ in range(NESTED):  # the innermost first
        text = REFERENCE.sub(value, text)
    return text
