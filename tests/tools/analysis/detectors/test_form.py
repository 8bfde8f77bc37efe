"""The form of a detector: what a list of findings says, and in which order they look."""

from __future__ import annotations

import pytest

from slime_ext.tools.analysis.findings import BEFORE, DETECTORS
from slime_ext.tools.commands import cli


def test_a_detector_looks_after_those_that_it_is_left_to():
    order = list(DETECTORS)
    late = [
        (name, other) for name in order for other in BEFORE[name] if order.index(other) > order.index(name)
    ]
    assert late == []


def test_what_a_detector_is_left_to_exists():
    names = {*DETECTORS, *(found.group for found in DETECTORS.values()), "any cause"}
    assert {other for found in DETECTORS.values() for other in found.after} <= names


def test_the_list_of_findings_says_what_each_is(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["analyze", "--findings"])
    lines = capsys.readouterr().out.splitlines()
    assert not ended.value.code and [line.split(" ")[0] for line in lines] == sorted(DETECTORS)
    assert "off_by_one (error, cause): " in "\n".join(lines)
