"""Brings the pinned wheels of the peers, and runs functions of them.

python -m tests.peers.wheels
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

from slime_ext.tools.releases import PEERS

FOLDER = Path(__file__).parents[2] / "build" / "peers"
COMMAND = "python -m tests.peers.wheels"


def folder(distribution: str, version: str) -> Path:
    """Returns the folder of a wheel. Raises FileNotFoundError with the command that brings it."""
    path = FOLDER / f"{distribution}-{version}"
    if not path.is_dir():
        raise FileNotFoundError(f"{distribution} {version}: {COMMAND}")
    return path


def install() -> None:
    """Installs the missing wheels, each into its own folder and without what it depends on."""
    for release in PEERS:
        target = FOLDER / f"{release.distribution}-{release.version}"
        if target.is_dir():
            continue
        # A wheel for another Python will do, because its functions are read as text.
        words = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
        words += ["--no-deps", "--no-compile", "--ignore-requires-python", "--root-user-action", "ignore"]
        unfinished = target.with_name(f".{target.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        pinned = f"{release.distribution}=={release.version}"
        subprocess.run([*words, "--target", str(unfinished), pinned], check=True)
        unfinished.rename(target)


def take(file: Path, *names: str, decorated: bool = False, **scope: Any) -> types.SimpleNamespace:
    """Returns functions, classes and constants of a file, which find everything else in ``scope``.

    Imports of the system inside a function go, because ``scope`` has what they bring.

    Args:
        decorated: whether functions and classes keep their decorators.
    """
    root, found = file.relative_to(FOLDER).parts[1], dict[str, ast.stmt]()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names:
            if not decorated:
                node.decorator_list = []
            found.setdefault(node.name, _WithoutImports(root).visit(node))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            for name in (t.id for t in targets if isinstance(t, ast.Name) and t.id in names):
                assign = ast.Assign([ast.Name(name, ast.Store())], node.value)
                found.setdefault(name, ast.copy_location(assign, node))
    if missing := set(names) - set(found):
        raise LookupError(f"{file} has no {', '.join(sorted(missing))}")
    future = ast.parse("from __future__ import annotations").body
    whole = ast.fix_missing_locations(ast.Module([*future, *(found[name] for name in names)], []))
    exec(compile(whole, str(file), "exec"), scope)
    return types.SimpleNamespace(**{name: scope[name] for name in names})


class _WithoutImports(ast.NodeTransformer):
    """Removes the imports of a package."""

    def __init__(self, root: str) -> None:
        self.root = root

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        return ast.Pass() if (node.module or "").split(".")[0] == self.root else node


if __name__ == "__main__":
    install()
