"""Every rule over the table of launches: what it says of those that break it, and of those that keep it."""

from __future__ import annotations

import pytest

from slime_ext.rules.judge import RULES, broken
from slime_ext.rules.rule import Severity
from tests.rules.launches import setup_of
from tests.rules.table import ROWS

IDS = [f"{number}-{name}" for number, (name, *_) in enumerate(ROWS)]


def test_every_rule_has_a_row_that_breaks_it_and_a_row_that_keeps_it():
    """Another name in the table is no rule's."""
    assert {name for name, _, line in ROWS if line} == set(RULES)
    assert {name for name, _, line in ROWS if line is None} == set(RULES)


@pytest.mark.parametrize(("name", "arguments", "line"), ROWS, ids=IDS)
def test_a_launch_gets_the_line_of_a_rule_if_it_breaks_the_rule(name, arguments, line):
    """Asked as ``check`` and ``init`` ask. A row is known whole, so that silence is never "unknown"."""
    setup = setup_of(**arguments)
    RULES[name].judge(setup)  # raises if it reads what the row leaves unknown
    messages = {said.rule.name: said.message for said in broken(setup, tuple(Severity))}
    if line is None:
        assert name not in messages
    else:
        start, _, rest = line.partition(" ... ")
        assert messages[name].startswith(start) and rest.removesuffix("$") in messages[name]
        assert not rest.endswith("$") or messages[name].endswith(rest[:-1])
