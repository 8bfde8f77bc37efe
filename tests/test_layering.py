"""Imports run one way, and nothing on the hook path waits for the device."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("layering")  # one worker parses the package
ROOT = Path(__file__).parents[1] / "slime_ext"
CPU = ROOT.with_name("slime_ext_cpu")
CPU_FLOORS = (
    "fork_server import_hooks install machine processes rounding tiny",
    "host_log preloaded shortcuts stand_ins tasks",
    "driver progress site wheel_loop",
    "host_process rehearsal",
    "rehearse train",
)
KNOW_CPU = {"tools/launch/python_script.py"}  # runs a script of miles, which looks for CUDA
# A room imports those that stand before it, and its own files; "room/" lists the inside of a room.
FLOORS = {
    "": (
        "aliases errors replacing",
        "ops",
        "core",
        "hosts presets steps testing",
        "config",
        "rules",
        "host",
        "tis adapters",
        "tools",
        "__main__",
    ),
    "core/": (
        "fields importing needs tokens",
        "statistics",
        "state",
        "losses steps",
        "scoped prefix_steps terms metrics",
        "centering idle",
        "correction",
    ),
    "testing/": ("steps", "hooks"),
    "hosts/": ("code contract estimators slices", "flags running"),
    "host/": (
        "memory",
        "current ranks wrapping",
        "certify configured packing published",
        "rollout_data",
        "staleness step_metrics",
        "policy_loss step_plan",
        "heads hook",
        "engine_answers train_step",
        "proximal_heads rollout_heads",
        "rollout_log startup",
    ),
    "rules/": (
        "setup",
        "rule",
        "of_ages of_center of_engines of_files of_flags of_groups of_hosts of_losses",
        "judge",
        "configuration",
    ),
    "config/": ("files foreign numbers words", "typed", "idle", "load", "places flat"),
    "tools/": (
        "checkout collection decision folders modules plain_torch releases wording",
        "analysis",
        "report",
        "launch",
        "convert",
        "check",
        "commands",
    ),
    "tools/launch/": (
        "launch python_script questions",
        "trace",
        "starts visible",
        "surroundings",
        "edits sandbox",
        "script_run",
        "reader read",
        "sources",
    ),
    "tools/check/": ("rollout_source router veil", "setup", "lines", "run"),
    "tools/analysis/": (
        "document headline tables texts",
        "values",
        "fields",
        "records",
        "readers",
        "measures",
        "detectors",
        "findings",
        "page request",
        "pipeline",
        "run",
        "follow",
    ),
}
MATHEMATICS = (
    "ops",
    "core/needs",
    "core/tokens",
    "core/statistics",
    "core/state",
    "core/losses",
    "core/steps",
    "core/scoped",
    "core/prefix_steps",
    "core/terms",
    "core/centering",
    "core/correction",
    "presets",
)
HOOK_PATH = (*MATHEMATICS, "core/metrics", "hosts", "host", "tis")
FORBIDDEN_IN_MATHEMATICS = {"megatron", "slime", "yaml", "argparse", "pydantic", "torch.distributed", "numpy"}
SYNCS = {"item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique"}
# On CPU a log-prob is looked at in the call; rollouts are read, and sampled, before training; steps are
# reduced once.
MAY_WAIT = (
    *("host/packing.py", "host/rollout_data.py", "host/rollout_heads.py"),
    "core/metrics/totals.py",
)


def modules(*rooms):
    paths = [p for p in sorted(ROOT.rglob("*.py")) if p != ROOT / "__init__.py"]
    return [p for p in paths if not rooms or any(is_in(p, room) for room in rooms)]


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


def is_in(path, room):
    name = named(path).removesuffix(".py")
    return name == room or name.startswith(room + "/")


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


def floor(name, inside):
    """The number of the floor on which a dotted name stands inside a room; None outside of it."""
    path = name.removeprefix("slime_ext.").replace(".", "/")
    if not path.startswith(inside):
        return None
    first = path.removeprefix(inside).partition("/")[0]
    return next((i for i, each in enumerate(FLOORS[inside]) if first in each.split()), None)


def rank(path):
    """The floors of a file: of its room, and inside of it."""
    name = named(Path(path)).removesuffix(".py")
    return [floor(name, inside) or 0 for inside in ("", name.partition("/")[0] + "/") if inside in FLOORS]


@functools.cache
def imported_by(path):
    """The names of ours that a file imports, at its top level or in a function."""
    return [name for name in imported(parsed(path)) if name.startswith("slime_ext.")]


@pytest.mark.parametrize("inside", FLOORS)
def test_imports_run_downhill(inside):
    paths = [p for p in modules() if named(p).startswith(inside)]
    for path in paths:
        here = floor(named(path).removesuffix(".py").removesuffix("/__init__"), inside)
        names = imported_by(path)
        uphill = {n for n in names if here is not None and (floor(n, inside) or 0) > here}
        assert not uphill, path


def test_no_detector_imports_another_detector():
    room = "slime_ext.tools.analysis.detectors."
    for path in (ROOT / "tools/analysis/detectors").glob("*.py"):
        names = {name for name in imported_by(path) if name.startswith(room)}
        assert not {name for name in names if not name.startswith(room + "shared")}, path


def arrows(trees):
    """Module -> the modules among ``trees`` that it imports, at its top level or in a function."""
    graph = {}
    for name, tree in trees.items():
        imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module]
        full = [(f"{n.module}.{alias.name}", n.module) for n in imports for alias in n.names]
        full += [(n.name, n.name) for n in ast.walk(tree) if isinstance(n, ast.alias)]
        graph[name] = {module if module in trees else package for module, package in full} & trees.keys()
    return {name: imports - {name} for name, imports in graph.items()}


def in_circles(graph):
    """The part of a graph in which every module imports another one and is imported by one."""
    while True:
        imported_ones = set().union(*graph.values())
        kept = {name: each & graph.keys() for name, each in graph.items() if name in imported_ones}
        kept = {name: each for name, each in kept.items() if each}
        if kept == graph:
            return graph
        graph = kept


def test_no_module_imports_itself_through_others():
    """A circle is not seen by the floors if it stays on one of them."""
    paths = {".".join(p.relative_to(ROOT.parent).with_suffix("").parts): p for p in modules()}
    trees = {name.removesuffix(".__init__"): parsed(path) for name, path in paths.items()}
    assert in_circles(arrows(trees)) == {}
    late = ast.parse("def f():\n    from p import b")
    circle = {"p.a": ast.parse("from p.b import x"), "p.b": ast.parse("import p.c"), "p.c": late}
    assert in_circles(arrows(circle)).keys() == {"p.b", "p.c"}
    assert in_circles(arrows(circle | {"p.c": ast.parse("from p import d")})) == {}


def test_the_plugin_does_not_import_what_stands_in_for_cuda():
    """The command line names its modules in a text: `slime_ext/tools/commands/cli.py`."""
    found = {named(p) for p in modules() if any(n.split(".")[0] == CPU.name for n in imported(parsed(p)))}
    assert found == KNOW_CPU


def test_imports_run_downhill_without_cuda():
    floors = {name: i for i, names in enumerate(CPU_FLOORS) for name in names.split()}
    for path in sorted(CPU.rglob("*.py")):
        room = path.relative_to(CPU).parts[0].removesuffix(".py")
        names = [n.split(".") for n in imported(parsed(path))]
        rooms = {parts[1] for parts in names if parts[0] == CPU.name and len(parts) > 1} - {room}
        assert room == "__init__" or all(floors[each] < floors[room] for each in rooms), path
    there = {p.name.removesuffix(".py") for p in CPU.iterdir()} - {
        "__init__",
        "__pycache__",
        "requirements.txt",
    }
    assert there == set(floors)


def test_every_file_stands_on_a_floor():
    for inside, floors in FLOORS.items():
        there = {p.name.removesuffix(".py") for p in (ROOT / inside).iterdir()} - {
            "__init__",
            "__pycache__",
            "py.typed",
        }
        assert there <= {name for each in floors for name in each.split()}


def test_the_mathematics_knows_torch_alone():
    for path in modules(*MATHEMATICS):
        names = set(imported(parsed(path)))
        assert not {
            n for n in names for bad in FORBIDDEN_IN_MATHEMATICS if n == bad or n.startswith(bad + ".")
        }


def test_no_host_framework_at_import_time():
    for path in modules("host", "hosts", "tis", "config", "core/metrics"):
        names = imported(parsed(path), top_level_only=True)
        assert not [n for n in names if n.split(".")[0] in ("megatron", "slime")], path


def test_nothing_on_the_hook_path_waits_for_the_device():
    for path in [p for p in modules(*HOOK_PATH) if named(p) not in MAY_WAIT]:
        calls = [n for n in ast.walk(parsed(path)) if isinstance(n, ast.Call)]
        syncs = [n.lineno for n in calls if isinstance(n.func, ast.Attribute) and n.func.attr in SYNCS]
        tests = [
            n.lineno
            for n in calls
            if isinstance(n.func, ast.Attribute) and n.func.attr in ("any", "all") and not n.args
        ]
        assert not syncs + tests, path


def test_what_a_run_remembers_can_be_forgotten():
    """No empty collection of a module, which fills up later, and no function that assigns to a name outside
    of it: both would outlive ``memory.forget``."""
    for path in [p for p in modules("host", "hosts", "rules", "tis") if named(p) != "host/memory.py"]:
        tree = parsed(path)
        values = [n.value for n in tree.body if isinstance(n, ast.Assign | ast.AnnAssign) and n.value]
        empty = [v for v in values if ast.unparse(v) in ("{}", "[]", "set()", "dict()", "list()")]
        outer = [n for n in ast.walk(tree) if isinstance(n, ast.Global | ast.Nonlocal)]
        assert not empty + outer, path


# Names that do not say what they hold.
SAY_NOTHING = set("fates wobble sway evened again mine own given told found old now shown".split())
FROZEN = {  # fields of recorded figures
    ("tools/analysis/detectors/shared/estimators.py", "own"),
}


def bound_names(tree):
    """The names that a module gives: to functions, classes, parameters, variables, attributes and imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler):
            yield node.name or ""
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


def empty_names(tree):
    return {name for name in bound_names(tree) if name.strip("_").lower() in SAY_NOTHING}


def test_names_say_what_they_hold():
    named_so = {(named(path), name) for path in modules() for name in empty_names(parsed(path))}
    assert named_so == FROZEN
    assert not [path for path in CPU.rglob("*.py") if empty_names(parsed(path))]
    forms = ("own = 1", "def _told(): 1", "lambda given: 1", "x.FOUND = 1", "from a import b as mine")
    assert all(empty_names(ast.parse(form)) for form in forms)
    assert not empty_names(ast.parse("known = own(given=told)[now]"))


def test_the_mathematics_never_touches_the_hosts_arguments():
    for path in modules(*MATHEMATICS):
        assert "args." not in path.read_text(), path


def test_the_oracle_is_independent():
    oracle = Path(__file__).with_name("oracle.py")
    assert not [n for n in imported(parsed(oracle)) if n.split(".")[0] in ("slime_ext", "torch")]


FRESH = """
import sys, types
import torch, yaml
brought = {name.partition(".")[0] for name in sys.modules} | sys.stdlib_module_names
from slime_ext import tis
one = [torch.zeros(2)]
args = types.SimpleNamespace(use_tis=True)
call = {"train_log_probs": one, "rollout_log_probs": one, "loss_masks": [torch.ones(2)]}
tis.token_tis(args, pg_loss=torch.ones(2), total_lengths=[3], response_lengths=[2], **call)
now = {name.partition(".")[0] for name in sys.modules if name[0] != "_"}
print(*sorted(now - brought))
"""


def test_a_training_process_pays_for_torch_and_pyyaml_alone():
    ran = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["slime_ext"]
