"""The form of a detector: what a list of findings says, and in which order they look."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from pathlib import Path

import pytest

from slime_ext.tools.analysis import detectors
from slime_ext.tools.analysis.findings import BEFORE, DETECTORS, measures
from slime_ext.tools.analysis.measures.curves import Curves
from slime_ext.tools.analysis.measures.sums import Sums
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


@functools.cache
def parsed(path):
    """The module in a file, which several tests walk through and none may change."""
    return ast.parse(path.read_text())


@functools.cache
def nodes(tree):
    return list(ast.walk(tree))


@functools.cache
def naming():
    """For each statement of the detectors' modules: its path, its node, and the names in it."""
    asking = (ROOM.parent / "findings" / "__init__.py", ROOM.parent / "run.py")  # all detectors
    files = (*ROOM.rglob("*.py"), *asking)
    paths = [(path, node) for path in files for node in parsed(path).body]
    names = ({leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name)} for _, node in paths)
    return [(*pair, each) for pair, each in zip(paths, names, strict=True)]


def readers(name):
    """The modules of detectors that name a class outside of its definition, and those that ask all detectors:
    directly, or through a function of ``shared`` that does."""
    users, wanted = set(), {name}
    while wanted:
        one, functions = wanted.pop(), set()
        for path, node, names in naming():
            if one not in names or getattr(node, "name", "") == one:
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


SHARED = {"sums": Sums, "curves": Curves}  # field of a Diagnosis -> its class


def readers_of_fields(owner, home, trees):
    """Field of the shared class in the file ``home`` -> the files that read it.

    Its own file reads a field in any method but ``add``. Another file reads ``owner.field``, or a property
    that reads it.
    """
    kind = next(n for n in trees[home].body if getattr(n, "name", "") == SHARED[owner].__name__)
    declared = [n for n in kind.body if isinstance(n, ast.AnnAssign)]
    users = {n.target.id: set() for n in declared if "ClassVar" not in ast.unparse(n.annotation)}
    through = {name: {name} for name in users}  # what an attribute reads
    for method in [n for n in kind.body if isinstance(n, ast.FunctionDef) and n.name != "add"]:
        read = {n.attr for n in ast.walk(method) if isinstance(n, ast.Attribute)} & users.keys()
        if method.decorator_list:
            through[method.name] = read
        else:
            for name in read:
                users[name].add(home)
    for path in trees.keys() - {home}:
        for attribute, holders in attributes(trees[path]):
            if owner in holders:
                for name in through.get(attribute, ()):
                    users[name].add(path)
    return users


@functools.cache
def attributes(tree):
    """Each attribute that a module reads, and the names of what holds it."""
    read = [node for node in nodes(tree) if isinstance(node, ast.Attribute)]
    return [(n.attr, (getattr(n.value, "id", ""), getattr(n.value, "attr", ""))) for n in read]


def lonely(owner, home, trees):
    """The fields of a shared class that nobody reads, or one file that is not its own."""
    users = readers_of_fields(owner, home, trees).items()
    return {name for name, paths in users if len(paths) < 2 and paths != {home}}


@pytest.mark.parametrize("owner", SHARED)
def test_a_field_of_shared_sums_has_two_readers_or_is_read_where_it_is_summed(owner):
    paths = {path.stem: path for path in ROOM.parent.rglob("*.py")}
    trees = {name: parsed(path) for name, path in paths.items()}
    assert lonely(owner, owner, trees) == set()
    trees[owner] = ast.parse(paths[owner].read_text())
    kind = next(n for n in trees[owner].body if getattr(n, "name", "") == SHARED[owner].__name__)
    kind.body.append(ast.parse("z: float = 0.0").body[0])
    one = {"one": ast.parse(f"d.{owner}.z")}
    assert lonely(owner, owner, trees) == lonely(owner, owner, trees | one) == {"z"}
    assert lonely(owner, owner, trees | one | {"two": ast.parse(f"{owner}.z")}) == set()


def test_no_detector_asks_for_a_number_by_a_string():
    """Typed access: ``d.of(Class).field``, ``d.sums.field``, ``d.curves.field``."""
    asked = defaultdict(set)
    for path in ROOM.rglob("*.py"):
        for node in nodes(parsed(path)):
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                if isinstance(node.slice.value, str) and ast.unparse(node.value).startswith("d."):
                    asked[path.stem].add(node.slice.value)
    assert asked == {}


def test_no_measure_counts_under_string_keys():
    """A counter by name would hide who reads a count."""
    kept = set()
    for path in (ROOM.parent / "measures").glob("*.py"):
        annotations = [n for n in nodes(parsed(path)) if isinstance(n, ast.AnnAssign)]
        kept |= {
            (path.stem, ast.unparse(n.target))
            for n in annotations
            if ast.unparse(n.annotation) in ("Counter[str]", "dict[str, float]", "dict[str, Tensor]")
        }
    assert kept == set()
