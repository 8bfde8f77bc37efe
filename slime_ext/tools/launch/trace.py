"""Defines the record of a sandboxed run: bash's trace, and the programs it would start."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import dropwhile, pairwise
from pathlib import Path
from typing import NamedTuple

from slime_ext.tools.launch.questions import Question

BEGIN, END, BETWEEN = (
    "\ue000",
    "\ue001",
    "\ue002",
)  # private characters; ``script_text`` refuses scripts that contain them
TOKEN = re.compile(f"{BEGIN}(\\d+){END}")
UNKNOWN = re.compile(f"[{BEGIN}{END}]")  # also matches a part that a script cut out of a token
PS4 = f"+${{BASH_SOURCE}}{BETWEEN}${{LINENO}}{BETWEEN}${{PWD}}{BETWEEN}"
TYPED = f"/{BETWEEN}typed"  # the file with what someone types while the script runs
# What changes bash's trace, which goes to stderr: 2>&1, 2> log, &> log, |&, bash FILE, bash -c TEXT. Quotes
# and comments stay.
OF_STDERR = re.compile(
    r"\"(?:\\.|[^\"\\])*\"|'[^']*'|(?<!\S)#[^\n]*|(?<=[\s)])2>>?[ \t]*(?:&1|[\w./-]+)|&>|\|&"
    r"|(?<![\w./$-])(?P<shell>bash|sh)(?=[ \t;)\n]|$)(?:[ \t]+-(?P<command>[a-z]*c)(?![\w-])"
    r"(?P<text>[ \t]+(?:\"(?:\\.|[^\"\\])*\"|'[^']*'))?)?"
)
STDERR_TO = {"2>": "", "&>": ">", "|&": "|"}
# What PS4 puts before each traced command, and bash before it a plus per level: ++run.sh|12|/root|
TRACED = re.compile(rf"^\++([^{BETWEEN}\n]*){BETWEEN}(\d+){BETWEEN}([^{BETWEEN}\n]*){BETWEEN}", re.M)
COMPLAINT = re.compile(r"^(\S+): line (\d+): (.*)$", re.MULTILINE)  # run.sh: line 3: X: unbound variable
PROGRAMS = ("train.py", "train_async.py", "train_multi_lora_async.py")
MAPPING = (".yaml", ".yml", ".json")  # endings of files from which a launch can read settings
# Commands that name train.py only to look at it, to copy it or to end it.
NO_LAUNCH = frozenset(
    "pkill pgrep kill grep egrep rg cat less more head tail sed awk ls find cp mv rm ln chmod tee diff wc "
    "stat which type command hash file git vim nano scp rsync wget curl tar zip gzip zstd md5sum "
    "sha256sum cksum chown touch du install".split()
)
SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
SHELL = (".sh", ".bash", ".zsh", ".ksh", ".slurm", ".sbatch")  # endings of shell scripts
OF_SLURM = ("sbatch", "srun")
# Options of Slurm that take the next word as their value: -N 4 --time 1:00:00
OF_SLURM_WITH_VALUE = re.compile(
    r"-[AabCcDdeFGiJkLMmNnoPpqrSTtwx]|--(?!exclusive|wait|parsable|requeue|no-|hold|overcommit|oversubscribe|"
    r"contiguous|quiet|verbose|test-only|ignore-pbs|spread-job|overlap|unbuffered|label|pty|kill-on)[\w-]+"
)
OF_SSH = re.compile(r"-[bcDEeFIiJLlmOopQRSWw]")  # options of ssh that take a value


def traced(text: str) -> str:
    """Returns a script whose shells all print their trace to stderr, and to no file.

    >>> traced("bash a.sh > log 2>&1; bash -lc 'b' |& tee c; echo '2>&1'")
    "bash -x a.sh > log ; bash -xlc 'b' | tee c; echo '2>&1'"
    """
    return OF_STDERR.sub(_traced, text)


def _traced(match: re.Match[str]) -> str:
    if match["shell"]:
        text = re.sub(r"(?s)(\s+.)(.*)(.)", lambda t: t[1] + traced(t[2]) + t[3], match["text"] or "")
        return f"{match['shell']} -x{match['command'] or ''}{text}"
    return match[0] if match[0][0] in "#\"'" else STDERR_TO[match[0][:2]]


class Guess(NamedTuple):
    """A guess about the machine of a script.

    Args:
        fails: whether commands with an unknown answer fail instead of succeeding.
        outcomes: the outcome of each question about the machine; None for the usual one.
        asked: the command or the question that has another outcome than the others.
        outcome: the outcome of that question.
        is_wide: whether tokens are longer than usual. A word that then differs was cut out of tokens.
        words: how many words commands with an unknown answer, unknown files and those who type give.
        breaks: whether launches fail instead of succeeding.
    """

    fails: bool = False
    outcomes: int | None = None
    asked: str = ""
    outcome: int = 0
    is_wide: bool = False
    words: int = 1
    breaks: bool = False

    def outcome_of(self, key: str, question: Question) -> int | None:
        """Returns the position of a question's outcome; None if the script's text stays."""
        if key == self.asked:
            return self.outcome
        return question.usual if self.outcomes is None else self.outcomes

    def worded(self, text: str) -> str:
        """Returns a text with its tokens as the script sees them under this guess."""
        return widened(text) if self.is_wide else text


def widened(text: str) -> str:
    """Returns a text with longer tokens."""
    return TOKEN.sub(lambda match: f"{BEGIN}{int(match[1]):09}{END}", text)


def narrowed(text: str) -> str:
    """Undoes ``widened``."""
    return TOKEN.sub(lambda match: f"{BEGIN}{int(match[1])}{END}", text)


class Call(NamedTuple):
    """A program that the script would start."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str
    files: Mapping[str, str]  # name -> text of the files that its words name and that the script wrote
    changed: frozenset[str]  # paths of configurations that the script changed


class Command(NamedTuple):
    """A command that the sandbox answers, with what it reads."""

    words: tuple[str, ...]
    folder: str
    stdin: str


class Line(NamedTuple):
    """A command in bash's trace, with its words expanded."""

    file: str
    number: int
    folder: str
    text: str

    @property
    def words(self) -> list[str]:
        """Returns the command's words; an empty list if they cannot be split."""
        return list(split(self.text))


@cache
def split(text: str) -> tuple[str, ...]:
    """Splits a text into words as a shell does; empty if its quotes do not match."""
    try:
        return tuple(shlex.split(text))
    except ValueError:
        return ()


@dataclass
class Run:
    """A run of a script in the sandbox.

    Args:
        calls: the programs that the script would start.
        commands: all commands that the sandbox answers.
        changed: the configurations that a text passed to a shell changed.
        unknown: command with an unknown answer -> how often the script ran it.
        passes: command that lets a loop run once -> how often the script ran it.
        trace: the trace of bash, with its error messages.
        status: the script's exit status.
        error: why the sandbox ended the run; empty if it did not.
        made: the tested paths that the script itself made.
        end: ends the run at its next command.
    """

    calls: list[Call] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    changed: set[str] = field(default_factory=set)
    unknown: Counter[str] = field(default_factory=Counter)
    passes: Counter[tuple[str, ...]] = field(default_factory=Counter)
    trace: str = ""
    status: int = 0
    error: str = ""
    made: set[str] = field(default_factory=set)
    end: Callable[[], None] | None = None

    @cached_property
    def lines(self) -> list[Line]:
        """Returns the traced commands, once the run has ended."""
        prefixes = list(TRACED.finditer(self.trace))
        ends = [*(match.start() for match in prefixes[1:]), len(self.trace)]
        texts = [self.trace[match.end() : end] for match, end in zip(prefixes, ends, strict=False)]
        texts = [COMPLAINT.split(text)[0].rstrip("\n").removeprefix("command ") for text in texts]
        return [Line(m[1], int(m[2]), m[3], text) for m, text in zip(prefixes, texts, strict=True)]


@cache
def name_of(path: str) -> str:
    """Returns the last part of a path. Cached, because every run asks for the same words."""
    return Path(path).name


def program_of(words: Sequence[str]) -> int | None:
    """Returns the position of train.py in a command that starts it; None for other commands."""
    if name_of(words[0]) in NO_LAUNCH:
        return None
    return next((i for i, word in enumerate(words) if name_of(word) in PROGRAMS), None)


def shell_text(words: Sequence[str], stdin: str = "") -> tuple[str, list[str]] | None:
    """Returns the text and arguments that a program passes to a shell.

    The forms are ``srun bash -c TEXT``, ``ssh HOST TEXT``, ``sbatch --wrap TEXT``, ``tmux new-session TEXT``,
    and with the text on stdin ``sbatch``, ``ssh HOST`` and ``srun bash -s``. Returns None for other commands.
    """
    for i, word in enumerate(words[:-2]):
        if name_of(word) in SHELLS and re.fullmatch(r"-[a-z]*c", words[i + 1]):
            return words[i + 2], list(words[i + 3 :])
    text = _submitted(words)
    last = [name_of(word) for word in words if word not in ("-s", "-x")][-1]
    if not text and (words[0] in ("sbatch", "ssh") or last in SHELLS) and words[0] not in NO_LAUNCH:
        text = stdin
    return (text, []) if text.strip() else None


def script_of(words: Sequence[str]) -> Sequence[str]:
    """Returns the script that a command passes to a shell, with the script's arguments; empty if it does not.

    >>> script_of(["sbatch", "-N", "2", "--exclusive", "a.sh", "b"])
    ['a.sh', 'b']
    >>> script_of(["srun", "bash", "-x", "a.sh"])
    ['a.sh']
    """
    if words[0] in NO_LAUNCH:
        return ()
    if "/" in words[0] and Path(words[0]).suffix in SHELL:
        return words
    if words[0] in OF_SLURM:
        pairs = pairwise(words)
        is_command = (w[:1] != "-" and not OF_SLURM_WITH_VALUE.fullmatch(before) for before, w in pairs)
        at = next((i for i, is_first in enumerate(is_command, 1) if is_first), len(words))
        if at < len(words) and (words[0] == "sbatch" or Path(words[at]).suffix in SHELL):
            return words[at:]
    for i, word in enumerate(words[:-1]):
        if name_of(word) in SHELLS:
            rest = list(dropwhile(lambda option: option[:1] == "-", words[i + 1 :]))
            return rest if rest and Path(rest[0]).suffix in SHELL else ()
    return ()


def _submitted(words: Sequence[str]) -> str:
    """Returns the words of a command that a shell on another machine or in another window runs."""
    pairs = list(pairwise(["", *words]))
    if words[0] == "ssh":
        rest = [word for before, word in pairs if word[:1] != "-" and not OF_SSH.fullmatch(before)]
        return "" if rest[2:] and name_of(rest[2]) in SHELLS else " ".join(rest[2:])
    if words[0] == "sbatch":
        wrapped = (word for before, word in pairs if before == "--wrap" or word.startswith("--wrap="))
        return next(wrapped, "").removeprefix("--wrap=")
    if words[0] == "tmux":
        return next((word for word in words if " " in word), "")
    return ""


@cache
def at(folder: str, name: str) -> str:
    """Returns the path of a file that is named in a folder. An absolute name stays as it is."""
    return os.path.normpath(Path(folder, name))
