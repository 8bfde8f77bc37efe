"""A launch as a script makes it: program, flags with the place where each is written, environment, and what
of it is not known here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


class Unread(str):
    """A word of a launch that is known only where the script runs; its text is how the script writes it."""

    __slots__ = ()


@dataclass(frozen=True)
class WrittenFlag:
    """A flag of a launch.

    Args:
        name: with its dashes.
        values: its words, of which an ``Unread`` one is not known; none for a switch.
        where: ``file:line``.
        instead: what messages show in place of its words, where these come from another file than the
            script, or from a variable.
    """

    name: str
    values: tuple[str, ...] = ()
    where: str = ""
    instead: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.instead}" if self.instead else " ".join([self.name, *self.values])


@dataclass(frozen=True)
class Gap:
    """A place of a launch at which there are words that are not known here.

    Args:
        at: the number of flags before it.
        text: why, as the script writes it.
        where: ``file:line``.
        names: flags that can be among those words; None where any can.
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
    """What a launch script starts.

    Args:
        script: path.
        program: train.py or another of the hosts' programs, as it is named there; empty where the script
            starts none.
        flags: in their order; the last of a name counts.
        environment: variables of the job.
        gaps: where words are that are not known here.
        folder: the working directory of the program, where the script says it.
        notes: what a reader should know of how the script was read.
        files: name -> text, of YAML and JSON that its flags name and the script itself writes.
        veiled: names of those of them, and the folder, if a part of it comes from another file or a variable.
        text: all that was read.
        root: the checkout of slime or miles that the script lies in.
        own_folder: where the script's own files are: that checkout, its repository, or its folder.
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
    def asynchronous(self) -> bool:
        """Whether rollouts are sampled while the trainer trains on the one before."""
        return self.program.endswith("_async.py")

    def flag(self, name: str) -> WrittenFlag | None:
        """The flag of this name that counts."""
        return next((flag for flag in reversed(self.flags) if flag.name == name), None)

    def gap(self, name: str) -> Gap | None:
        """A gap behind the flag that counts, in which this flag can stand once more."""
        last = max((i for i, flag in enumerate(self.flags, 1) if flag.name == name), default=0)
        gaps = (gap for gap in self.gaps if gap.at >= last)
        return next((gap for gap in gaps if gap.names is None or name in gap.names), None)

    def value(self, name: str, default: str = "") -> str:
        """The first word of a flag."""
        flag = self.flag(name)
        return flag.values[0] if flag and flag.values else default

    def number(self, name: str, default: int) -> int:
        """A flag's whole number; the default where it is absent, no number, or unknown."""
        text = self.value(name)
        return int(text) if text.isdigit() and not isinstance(text, Unread) else default

    def lacks(self, *names: str) -> bool:
        """Whether it certainly has none of these flags."""
        return not any(self.flag(name) or self.gap(name) for name in names)

    def known_number(self, name: str) -> float | None:
        """A flag's number; None where it is absent, no number, or not known here."""
        try:
            return float(self.value(name)) if self.is_known(name) else None
        except ValueError:
            return None

    def is_known(self, name: str) -> bool:
        """Whether a flag, or its absence, is known here."""
        flag = self.flag(name)
        return not (self.gap(name) or (flag and any(isinstance(v, Unread) for v in flag.values)))
