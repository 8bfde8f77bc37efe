"""The form of a detector: what a list of findings says, and in which order they look."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from slime_ext.tools.analysis import detectors
from slime_ext.tools.analysis.findings import BEFORE, DETECTORS, measures
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


ROOM = Path(detectors.__file__).parent


def readers(name):
    """The modules of detectors that name a class outside of its definition: directly, or through a function
    of ``shared`` that does."""
    trees = {path: ast.parse(path.read_text()) for path in ROOM.rglob("*.py")}
    users, wanted = set(), {name}
    while wanted:
        one, functions = wanted.pop(), set()
        for path, tree in trees.items():
            for node in tree.body:
                named = {leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name)}
                if one not in named or getattr(node, "name", "") == one:
                    continue
                if path.parent.name == "shared" and isinstance(node, ast.FunctionDef):
                    functions.add(node.name)
                elif path.parent.name != "shared":
                    users.add(path.stem)
        wanted |= functions - {name}
    return users


def test_a_measure_in_a_file_of_its_detector_is_read_there_and_a_shared_one_by_two():
    where = {kind: type(measure).__module__.split(".")[-2:] for kind, measure in measures(None).items()}
    lonely = {kind for kind, (room, _) in where.items() if room == "shared" and len(readers(kind)) < 2}
    strange = {kind for kind, (room, own) in where.items() if room != "shared" and own not in readers(kind)}
    assert len(where) > 30 and (lonely, strange) == (set(), set())


def test_no_detector_asks_for_a_number_by_a_string():
    """Typed access: ``d.of(Class).field``. Names of curves, of their columns and of sums of tokens stay."""
    asked = defaultdict(set)
    for path in ROOM.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                owner = ast.unparse(node.value)
                if isinstance(node.slice.value, str) and ("d.of(" in owner or owner.startswith("d.means")):
                    asked[path.stem].add(node.slice.value)
    assert asked == {}
