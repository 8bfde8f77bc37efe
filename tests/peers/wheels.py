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
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
TAKEN: set[tuple[str, str]] = set()  # file of a wheel, without the wheel's folder, and a name that was taken


def folder(distribution: str, version: str) -> Path:
    """Returns the folder of a wheel. Raises FileNotFoundError with the command that brings it."""
    path = FOLDER / f"{distribution}-{version}"
    if not path.is_dir():
        raise FileNotFoundError(f"{distribution} {version}: {COMMAND}")
    return path


def install(distribution: str, version: str) -> None:
    """Installs a wheel alone, into a folder with its name and version, unless that exists."""
    target = FOLDER / f"{distribution}-{version}"
    if target.is_dir():
        return
    # A wheel for another Python will do, because its functions are read as text.
    words = [*PIP, "install", "-qq", "--no-deps", "--no-compile", "--ignore-requires-python"]
    unfinished = target.with_name(f".{target.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    pinned = f"{distribution}=={version}"
    subprocess.run([*words, "--root-user-action", "ignore", "--target", str(unfinished), pinned], check=True)
    unfinished.rename(target)


def install_all() -> None:
    """Installs the pinned wheels of all peers."""
    for release in PEERS:
        install(release.distribution, release.version)


def take(file: Path, *names: str, decorated: bool = False, **scope: Any) -> types.SimpleNamespace:
    """Returns functions, classes and constants of a file, which find everything else in ``scope``.

    Imports of the system inside a function go, because ``scope`` has what they bring.

    Args:
        decorated: whether functions and classes keep their decorators.
    """
    root, found = file.relative_to(FOLDER).parts[1], dict[str, ast.stmt]()
    TAKEN.update((str(Path(*file.relative_to(FOLDER).parts[1:])), name) for name in names)
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


def fields_of(file: Path) -> list[str]:
    """Returns the names of the fields that the classes of a file declare."""
    classes = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef))
    fields = (line.target for each in classes for line in each.body if isinstance(line, ast.AnnAssign))
    return [target.id for target in fields if isinstance(target, ast.Name)]


def text_of(wheel: Path, file: str, name: str) -> str:
    """Returns the code of a function, class or constant without comments; empty where a wheel lacks it."""
    path = wheel / file
    for node in ast.walk(ast.parse(path.read_text() if path.is_file() else "")):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        names = [getattr(target, "id", "") for target in targets]
        if getattr(node, "name", "") == name or name in names:
            return ast.unparse(node)
    return ""


class _WithoutImports(ast.NodeTransformer):
    """Removes the imports of a package."""

    def __init__(self, root: str) -> None:
        self.root = root

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        return ast.Pass() if (node.module or "").split(".")[0] == self.root else node


if __name__ == "__main__":
    install_all()
