"""Defines a launch: program, flags with places, environment, and what is unknown of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from slime_ext.hosts.contract import flag_of
from slime_ext.hosts.flags import ARGUMENTS, DERIVED

SWITCHES = (*(flag_of(n) for n, a in ARGUMENTS.items() if a.kind.parse is None), "--colocate")
# The flags that rules read, and those that switch them off. A launch says of each why it is unknown.
READ = frozenset(
    {flag_of(name) for name, argument in ARGUMENTS.items() if argument.kind is not DERIVED}
    | {argument.switched_off_by for argument in ARGUMENTS.values() if argument.switched_off_by}
    | {*SWITCHES}
)


class Unread(str):
    """A word that is known only where the script runs, as the script writes it."""

    __slots__ = ()


@dataclass(frozen=True)
class WrittenFlag:
    """A flag of a launch.

    Args:
        name: the name with its dashes.
        values: the words of its value; an ``Unread`` word is unknown, and a switch has no words.
        where: ``file:line``.
        instead: the text that messages show instead of the words; set if the words come from a variable or
            from another file than the script.
    """

    name: str
    values: tuple[str, ...] = ()
    where: str = ""
    instead: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.instead}" if self.instead else " ".join([self.name, *self.values])


@dataclass(frozen=True)
class Launch:
    """The training run that a launch script starts.

    Args:
        script: the path of the script.
        program: train.py or another of the hosts' programs, as the script names it; empty if it starts none.
        flags: the flags in their order; the last flag of a name counts.
        environment: the variables of the job.
        unknown: flag of ``READ`` or of ``flags`` -> why it is unknown whether the launch has it, or which
            value it has.
        others: why the launch can have flags that are in neither; empty if it cannot.
        edits: the places where the script may change the file of --custom-config-path before the launch.
        folder: the working directory of the program, if the script changes it. A relative path starts where
            the script does; an ``Unread`` folder is unknown.
        folder_instead: the text that messages show instead of the folder, as in ``WrittenFlag``.
        notes: facts about how the script was read, one line each.
        files: name -> text of the YAML and JSON files that its flags name and that the script writes.
        text: the text of all scripts that were read.
        root: the checkout of slime or miles that contains the script.
        own_folder: the folder with the script's files: that checkout, its repository, or its folder.
    """

    script: str
    program: str = ""
    flags: tuple[WrittenFlag, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    others: str = ""
    edits: tuple[str, ...] = ()
    folder: str | None = None
    folder_instead: str = ""
    notes: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    root: Path | None = None
    own_folder: Path | None = None

    @property
    def runs_in(self) -> Path:
        """The working directory of the program. It is that of the script if the program's is unknown."""
        start = self.root or Path.cwd()
        return start if self.folder is None or isinstance(self.folder, Unread) else start / self.folder

    @property
    def asynchronous(self) -> bool:
        """Whether the next rollout is sampled while the trainer trains on the previous rollout."""
        return self.program.endswith("_async.py")

    @cached_property
    def counting(self) -> Mapping[str, WrittenFlag]:
        """The flags that count: of each name, the last one."""
        return {flag.name: flag for flag in self.flags}

    def flag(self, name: str) -> WrittenFlag | None:
        """Returns the flag of this name that counts; None if the launch has none."""
        return self.counting.get(name)

    def value(self, name: str, default: str = "") -> str:
        """Returns the first word of a flag's value."""
        flag = self.flag(name)
        return flag.values[0] if flag and flag.values else default

    def number(self, name: str, default: int) -> int:
        """Returns a flag's integer; the default if it is absent, unknown, or not an integer."""
        text = self.value(name)
        return int(text) if text.isdigit() and not isinstance(text, Unread) else default

    def is_known(self, name: str) -> bool:
        """Whether it is known that the flag is absent, or which value it has."""
        can_be_among_others = self.others and name not in READ and name not in self.counting
        return name not in self.unknown and not can_be_among_others

    def known_number(self, name: str) -> float | None:
        """Returns a flag's number; None if the flag is absent, unknown, or not a number."""
        try:
            return float(self.value(name)) if self.is_known(name) else None
        except ValueError:
            return None

    def lacks(self, *names: str) -> bool:
        """Whether the launch certainly has none of these flags."""
        return not any(self.flag(name) or not self.is_known(name) for name in names)
