"""Defines a launch: program, flags with places, environment, and what is unknown of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


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
class Gap:
    """A place in a launch where unknown words can be.

    Args:
        at: the number of flags before it.
        text: the part of the script that makes the words unknown.
        where: ``file:line``.
        names: flags that can be among those words; None if any flag can.
    """

    at: int
    text: str
    where: str
    names: frozenset[str] | None = None

    def __str__(self) -> str:
        what = "any flag" if self.names is None else ", ".join(sorted(self.names)) or "a value"
        return f"{self.where}: {self.text} is known only where the script runs: {what} can depend on it"


@dataclass(frozen=True)
class Launch:
    """The training run that a launch script starts.

    Args:
        script: the path of the script.
        program: train.py or another of the hosts' programs, as the script names it; empty if it starts none.
        flags: the flags in their order; the last flag of a name counts.
        environment: the variables of the job.
        gaps: the places where unknown words can be.
        folder: the working directory of the program, if the script changes it. A relative path starts where
            the script does; an ``Unread`` folder is unknown.
        notes: facts about how the script was read, one line each.
        files: name -> text of the YAML and JSON files that its flags name and that the script writes.
        veiled: the names of ``files``, and the folder, that contain text of another file or of a variable.
        text: the text of all scripts that were read.
        root: the checkout of slime or miles that contains the script.
        own_folder: the folder with the script's files: that checkout, its repository, or its folder.
    """

    script: str
    program: str = ""
    flags: tuple[WrittenFlag, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    gaps: tuple[Gap, ...] = ()
    folder: str | None = None
    notes: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    veiled: frozenset[str] = frozenset()
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

    def flag(self, name: str) -> WrittenFlag | None:
        """Returns the flag of this name that counts, which is the last one."""
        return next((flag for flag in reversed(self.flags) if flag.name == name), None)

    def gap(self, name: str) -> Gap | None:
        """Returns a gap in which a flag can appear after its last known place."""
        last = max((i for i, flag in enumerate(self.flags, 1) if flag.name == name), default=0)
        gaps = (gap for gap in self.gaps if gap.at >= last)
        return next((gap for gap in gaps if gap.names is None or name in gap.names), None)

    def value(self, name: str, default: str = "") -> str:
        """Returns the first word of a flag's value."""
        flag = self.flag(name)
        return flag.values[0] if flag and flag.values else default

    def number(self, name: str, default: int) -> int:
        """Returns a flag's integer; the default if it is absent, unknown, or not an integer."""
        text = self.value(name)
        return int(text) if text.isdigit() and not isinstance(text, Unread) else default

    def lacks(self, *names: str) -> bool:
        """Whether the launch certainly has none of these flags."""
        return not any(self.flag(name) or self.gap(name) for name in names)

    def known_number(self, name: str) -> float | None:
        """Returns a flag's number; None if the flag is absent, unknown, or not a number."""
        try:
            return float(self.value(name)) if self.is_known(name) else None
        except ValueError:
            return None

    def is_known(self, name: str) -> bool:
        """Whether it is known that the flag is absent, or which value it has."""
        flag = self.flag(name)
        return not (self.gap(name) or (flag and any(isinstance(v, Unread) for v in flag.values)))
