"""What happens when a script runs in the sandbox: bash's trace, and the programs that it would start."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

BEGIN, END, BETWEEN = "\ue000", "\ue001", "\ue002"  # private characters, which no script may contain
TOKEN = re.compile(f"{BEGIN}(\\d+){END}")
UNKNOWN = re.compile(f"[{BEGIN}{END}]")  # also in what a script cuts out of a token
PS4 = f"+${{BASH_SOURCE}}{BETWEEN}${{LINENO}}{BETWEEN}${{PWD}}{BETWEEN}"
TRACED = re.compile(rf"^\++([^{BETWEEN}\n]*){BETWEEN}(\d+){BETWEEN}([^{BETWEEN}\n]*){BETWEEN}", re.M)
COMPLAINT = re.compile(r"^(\S+): line (\d+): (.*)$", re.MULTILINE)  # of bash
PROGRAMS = ("train.py", "train_async.py", "train_multi_lora_async.py")
MAPPING = (".yaml", ".yml", ".json")  # of files that a launch can read its settings from
# What only names train.py, to look at it or to end it.
NO_LAUNCH = frozenset(
    "pkill pgrep kill grep egrep rg cat less more head tail sed awk ls find cp mv rm ln chmod tee diff wc "
    "stat which type command hash file git vim nano scp rsync wget curl tar zip gzip zstd md5sum "
    "sha256sum cksum chown touch du install".split()
)
SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
OF_SSH = re.compile(r"-[bcDEeFIiJLlmOopQRSWw]")  # options with a value


class Guess(NamedTuple):
    """What a script is told of its machine until it makes a launch.

    Args:
        fails: whether a command whose answer is not known fails, instead of succeeding.
        is_there: whether a file that is not known to be there is there.
        is_wide: whether tokens are longer than usually: a word that differs then was made of their letters.
    """

    fails: bool = False
    is_there: bool = False
    is_wide: bool = False

    def worded(self, text: str) -> str:
        """A text with its tokens as they are told to the script."""
        return widened(text) if self.is_wide else text


def widened(text: str) -> str:
    """A text with longer tokens."""
    return TOKEN.sub(lambda match: f"{BEGIN}{int(match[1]):09}{END}", text)


def narrowed(text: str) -> str:
    """A text with tokens as they were before ``widened``."""
    return TOKEN.sub(lambda match: f"{BEGIN}{int(match[1])}{END}", text)


class Call(NamedTuple):
    """A program that the script would start."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str
    files: Mapping[str, str]  # name -> text, of files that its words name and the script itself wrote


class Line(NamedTuple):
    """A command of bash's trace, its words expanded."""

    file: str
    number: int
    folder: str
    text: str

    @property
    def words(self) -> list[str]:
        """The command's words; none if they cannot be split."""
        return list(_split(self.text))


@cache
def _split(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError:
        return ()


@dataclass
class Run:
    """One run.

    Args:
        calls: the programs that it would start.
        unknown: how often it ran each command whose answer is not known.
        trace: of bash, with its complaints.
        status: the script's exit status.
        error: why it was ended, if it was.
        made: paths that the script tested, and that it had made itself.
        end: ends it at its next command.
    """

    calls: list[Call] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)
    trace: str = ""
    status: int = 0
    error: str = ""
    made: set[str] = field(default_factory=set)
    end: Callable[[], None] | None = None

    @cached_property
    def lines(self) -> list[Line]:
        """The trace of a run that has ended."""
        found = list(TRACED.finditer(self.trace))
        ends = [*(match.start() for match in found[1:]), len(self.trace)]
        texts = [self.trace[match.end() : end] for match, end in zip(found, ends, strict=False)]
        texts = [COMPLAINT.split(text)[0].rstrip("\n") for text in texts]
        return [Line(m[1], int(m[2]), m[3], text) for m, text in zip(found, texts, strict=True)]


def program_of(words: Sequence[str]) -> int | None:
    """The position of the train.py that a command starts."""
    if Path(words[0]).name in NO_LAUNCH:
        return None
    return next((i for i, word in enumerate(words) if Path(word).name in PROGRAMS), None)


def shell_text(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """The text and arguments that a program passes to a shell: ``srun bash -c TEXT``, ``ssh HOST TEXT``."""
    for i, word in enumerate(words[:-2]):
        if Path(word).name in SHELLS and re.fullmatch(r"-[a-z]*c", words[i + 1]):
            return words[i + 2], list(words[i + 3 :])
    if words[0] != "ssh":
        return None
    rest = [word for before, word in pairwise(words) if word[:1] != "-" and not OF_SSH.fullmatch(before)]
    return (" ".join(rest[1:]), []) if rest[1:] else None
