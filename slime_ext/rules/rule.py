"""Defines what a rule is: a condition, a message, a severity and a subject.

``init`` and the first hook call raise at REFUSE and log WARN. ``slime-ext check`` and ``rehearse`` raise at
REFUSE and HOST, and print WARN and HINT.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from slime_ext.errors import ConfigError
from slime_ext.rules.setup import Setup


class Severity(Enum):
    """Decides where a rule's message is raised, logged or printed; the module says how."""

    REFUSE = "slime_ext would be wrong, or never act"
    HOST = "the host refuses it"
    WARN = "probably not what you mean"
    HINT = "the launch can still add it"


REFUSE, HOST, WARN, HINT = Severity


class Subject(Enum):
    """Says what a rule judges. Some callers judge only one subject."""

    FILE = "the file of --custom-config-path, before it is loaded"
    CORRECTION = "the parts of the correction, together with the arguments"
    INIT_ALONE = "a launch that uses only init of slime_ext"
    LAUNCH = "anything else"


FILE, CORRECTION, INIT_ALONE, LAUNCH = Subject
Condition = Callable[[Setup], str | None]  # returns the message; None or empty if the launch keeps the rule


@dataclass(frozen=True)
class Rule:
    """One check of a launch: a condition, a message and a severity.

    Args:
        judge: the condition. It returns the message. Its name is the rule's name, and its docstring says what
            it judges.
        severity: where the message is raised, logged or printed.
        subject: what is judged.
    """

    judge: Condition
    severity: Severity
    subject: Subject

    @property
    def name(self) -> str:
        """The name for ``slime-ext check --ignore``."""
        return self.judge.__name__


def rule(severity: Severity, subject: Subject = LAUNCH) -> Callable[[Condition], Rule]:
    """Makes a rule of a function. ``judge`` finds it in the module that it is defined in."""
    return lambda condition: Rule(condition, severity, subject)


class Line(NamedTuple):
    """A message for the user, and the rule that it comes from, if any."""

    message: str
    rule: Rule | None = None

    def __str__(self) -> str:
        """Appends the rule's name to the message, as ruff does."""
        return f"{self.message} [{self.rule.name}]" if self.rule else self.message


class BrokenRuleError(ConfigError):
    """Raised with a rule's message.

    It holds the rule, but loses it when it is sent to another process.
    """

    rule: Rule | None = None

    @classmethod
    def of(cls, line: Line) -> BrokenRuleError:
        """Makes the error of a line."""
        error = cls(line.message)
        error.rule = line.rule
        return error
