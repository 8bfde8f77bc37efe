"""A launch as it was read: program, flags with the place where each was written, environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class WrittenFlag:
    """A flag of a launch.

    Args:
        name: with its dashes.
        values: its words; none for a switch.
        where: ``file:line``.
    """

    name: str
    values: tuple[str, ...] = ()
    where: str = ""

    def __str__(self) -> str:
        return " ".join([self.name, *self.values])


@dataclass(frozen=True)
class Launch:
    """What a launch script starts.

    Args:
        script: path.
        program: train.py or train_async.py, as it is named there.
        flags: in their order; the last of a name counts.
        environment: variables of the Ray job.
    """

    script: str
    program: str
    flags: tuple[WrittenFlag, ...]
    environment: Mapping[str, str]

    @property
    def asynchronous(self) -> bool:
        """Whether rollouts are sampled while the trainer trains on the one before."""
        return self.program.endswith("train_async.py")

    def flag(self, name: str) -> WrittenFlag | None:
        """The flag of this name that counts."""
        return next((flag for flag in reversed(self.flags) if flag.name == name), None)

    def value(self, name: str, default: str = "") -> str:
        """The first word of a flag."""
        flag = self.flag(name)
        return flag.values[0] if flag and flag.values else default

    def number(self, name: str, default: int) -> int:
        """A flag's whole number; the default where it is absent or no number."""
        text = self.value(name)
        return int(text) if text.isdigit() else default
