"""Judges a launch by every rule, or by those of one subject.

A rule is skipped if it reads an argument whose value is unknown, or asks the host's code and no host is
known; ``verdict`` says which rules were skipped and why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import NamedTuple

from slime_ext.errors import warn_once
from slime_ext.rules import (
    of_ages,
    of_center,
    of_engines,
    of_files,
    of_flags,
    of_groups,
    of_hosts,
    of_losses,
)
from slime_ext.rules.rule import (
    CORRECTION,
    FILE,
    INIT_ALONE,
    REFUSE,
    WARN,
    BrokenRuleError,
    Line,
    Rule,
    Severity,
)
from slime_ext.rules.setup import ArgumentUnknownError, Setup, UnknownError

# Rules are judged by severity, then in the order of these files and of the rules in them.
SUBJECTS = (of_files, of_flags, of_losses, of_center, of_groups, of_engines, of_ages, of_hosts)
DEFINED = [rule for subject in SUBJECTS for rule in vars(subject).values() if isinstance(rule, Rule)]
ALL = tuple(sorted(DEFINED, key=lambda rule: [*Severity].index(rule.severity)))
RULES = {rule.name: rule for rule in ALL}
OF_THE_FILE, OF_THE_CORRECTION, OF_INIT_ALONE = (
    tuple(rule for rule in ALL if rule.subject is subject) for subject in (FILE, CORRECTION, INIT_ALONE)
)


def broken(setup: Setup, severities: Collection[Severity], rules: Collection[Rule] = ALL) -> Iterator[Line]:
    """Yields the line of each rule of these severities that the launch breaks."""
    for rule in rules:
        if rule.severity in severities:
            with contextlib.suppress(UnknownError):
                if message := rule.judge(setup):
                    yield Line(message, rule)


class Verdict(NamedTuple):
    """The lines of all rules of a launch.

    Args:
        broken: the lines of the rules that the launch breaks.
        unread: why rules were skipped that read an argument whose value is unknown.
        unasked: what was not checked, because the code of the host or of a user is not here.
    """

    broken: tuple[Line, ...] = ()
    unread: tuple[Line, ...] = ()
    unasked: tuple[Line, ...] = ()

    def require(self, severities: Collection[Severity], rules: Collection[Rule] = ALL) -> None:
        """Raises BrokenRuleError with the first line of a rule of these severities."""
        for line in self.broken:
            if line.rule and line.rule in rules and line.rule.severity in severities:
                raise BrokenRuleError.of(line)


def verdict(setup: Setup) -> Verdict:
    """Judges a launch by every rule."""
    broken, unread, unasked = list[Line](), list[Line](), list[Line]()
    for rule in ALL:
        try:
            if message := rule.judge(setup):
                broken.append(Line(message, rule))
        except UnknownError as error:
            skipped = unread if isinstance(error, ArgumentUnknownError) else unasked
            skipped += [Line(str(error), rule)] if str(error) else []
    return Verdict(tuple(broken), tuple(unread), tuple(unasked))


def require(
    setup: Setup, severities: Collection[Severity] = (REFUSE,), rules: Collection[Rule] = ALL
) -> None:
    """Raises BrokenRuleError with the first line that ``broken`` yields."""
    for line in broken(setup, severities, rules):
        raise BrokenRuleError.of(line)


def enforce(setup: Setup, rules: Collection[Rule] = ALL) -> None:
    """Raises BrokenRuleError at the first REFUSE, and logs each WARN once, in a training process."""
    require(setup, rules=rules)
    for line in broken(setup, (WARN,), rules):
        warn_once(line.message)
