"""Imports run one way, and nothing on the hook path waits for the device."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1] / "slime_ext"
# A part of the package may import those of a lower rank, and its own.
RANK = {
    "errors": 0,
    "lazy_attributes": 1,
    "importing": 1,
    "folders": 1,
    "optional_args": 0,
    "mappings": 1,
    "ops": 1,
    "state": 2,
    "losses": 3,
    "steps": 3,
    "metrics": 3,
    "guards": 4,
    "checks": 4,
    "correction": 5,
    "compiled": 6,
    "own_steps": 6,
    "presets": 6,
    "dialects": 7,
    "config": 8,
    "host": 9,
    "patching": 9,
    "tis": 10,
    "testing": 10,
    "analysis": 11,
    "without_cuda": 12,
    "scripts": 12,
    "commands": 12,
    "cli": 13,
    "__main__": 14,
}
MATHEMATICS = ("ops", "state", "losses", "steps", "checks", "correction", "presets")
HOOK_PATH = (*MATHEMATICS, "metrics", "compiled", "host", "tis")
FORBIDDEN_IN_MATHEMATICS = {"megatron", "slime", "yaml", "argparse", "pydantic", "torch.distributed", "numpy"}
SYNCS = {"item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique"}
# On CPU a log-prob is looked at in the call; rollouts are read before training; steps are reduced once.
MAY_WAIT = ("host/packing.py", "host/rollout_data.py", "metrics/totals.py")


def modules(*parts):
    paths = [p for p in sorted(ROOT.rglob("*.py")) if p != ROOT / "__init__.py"]
    return [p for p in paths if not parts or part(p) in parts]


def part(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(tree, *, top_level_only=False):
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def named(path):
    return str(path.relative_to(ROOT))


def test_imports_run_downhill():
    for path in modules():
        ours = {
            name.split(".")[1]
            for name in imported(ast.parse(path.read_text()))
            if name.startswith("slime_ext.")
        }
        uphill = {name for name in ours if name in RANK and RANK[name] > RANK[part(path)]}
        assert not uphill, path


def test_the_documents_list_the_parts_from_the_lowest_to_the_highest():
    table = (
        (ROOT.parent / "docs/contributing.md")
        .read_text()
        .split("| part | what is in it |")[1]
        .split("\n\n")[0]
    )
    rows = [
        re.findall(r"`(?:slime_ext/)?(\w+)(?:/|\.py)`", row.split("|")[1]) for row in table.split("\n")[2:]
    ]
    ranks = [[RANK[name] for name in row] for row in rows]
    assert len(rows) > 9 and all(max(a) <= min(b) for a, b in pairwise(ranks))


def test_the_mathematics_knows_torch_alone():
    for path in modules(*MATHEMATICS):
        names = set(imported(ast.parse(path.read_text())))
        assert not {
            n for n in names for bad in FORBIDDEN_IN_MATHEMATICS if n == bad or n.startswith(bad + ".")
        }


def test_no_host_framework_at_import_time():
    for path in modules("host", "tis", "config", "metrics"):
        names = imported(ast.parse(path.read_text()), top_level_only=True)
        assert not [n for n in names if n.split(".")[0] in ("megatron", "slime")], path


def test_nothing_on_the_hook_path_waits_for_the_device():
    for path in [p for p in modules(*HOOK_PATH) if named(p) not in MAY_WAIT]:
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        syncs = [n.lineno for n in calls if isinstance(n.func, ast.Attribute) and n.func.attr in SYNCS]
        tests = [
            n.lineno
            for n in calls
            if isinstance(n.func, ast.Attribute) and n.func.attr in ("any", "all") and not n.args
        ]
        assert not syncs + tests, path


def test_the_mathematics_never_touches_the_hosts_arguments():
    for path in modules(*MATHEMATICS):
        assert "args." not in path.read_text(), path


def test_the_oracle_is_independent():
    oracle = Path(__file__).with_name("oracle.py")
    assert not [
        n for n in imported(ast.parse(oracle.read_text())) if n.split(".")[0] in ("slime_ext", "torch")
    ]
