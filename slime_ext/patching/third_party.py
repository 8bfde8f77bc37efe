"""Hooks of other people that a patched host would call with a keyword that they do not take."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slime_ext.host.contract import REQUIRED

SIGNATURE = set(REQUIRED)  # the call is by keyword: a hook without **kwargs has exactly these names
SKIPPED = {".git", ".venv", "venv", "node_modules", "__pycache__", "build"}


@dataclass(frozen=True)
class Warned:
    """One line for the user: where, and what will happen."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"warning: {self.where}: {self.what}"


def in_tree(root: Path, keywords: tuple[str, ...]) -> list[Warned]:
    """Warns of every function under ``root`` with a TIS hook's signature that does not take ``keywords``."""
    found = []
    for path in sorted(root.rglob("*.py")):
        if not SKIPPED.intersection(path.relative_to(root).parts):
            found += [_refuses(path, function, keywords) for function in _hooks(path)]
    return [warned for warned in found if warned]


def by_path(dotted: str, root: Path, keywords: tuple[str, ...]) -> list[Warned]:
    """Warns if the function that ``--custom-tis-function-path`` names does not take all ``keywords``. Nothing
    is imported: its file is read."""
    module, _, name = dotted.rpartition(".")
    flag = f"--custom-tis-function-path {dotted}"
    path = _file_of(module, root)
    if path is None:
        return [Warned(flag, f"no file of module '{module}' found, so its signature is not checked")]
    named = [function for function in _functions(path) if function.name == name]
    if not named:
        return [Warned(flag, f"{path} defines no function '{name}', so its signature is not checked")]
    return [warned for function in named if (warned := _refuses(path, function, keywords))]


def _file_of(module: str, root: Path) -> Path | None:
    relative = Path(*module.split("."))
    folders = [root, Path.cwd(), *(Path(entry or ".") for entry in sys.path)]
    files = (folder / ending for folder in folders for ending in (f"{relative}.py", relative / "__init__.py"))
    return next((file for file in files if module and file.is_file()), None)


def _functions(path: Path) -> Iterator[ast.FunctionDef]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _hooks(path: Path) -> Iterator[ast.FunctionDef]:
    try:
        source = path.read_bytes()
    except OSError:
        return
    if all(name.encode() in source for name in SIGNATURE):
        yield from (function for function in _functions(path) if _parameters(function) >= SIGNATURE)


def _parameters(function: ast.FunctionDef) -> set[str]:
    args = function.args
    return {arg.arg for arg in (*args.args, *args.kwonlyargs)}


def _refuses(path: Path, function: ast.FunctionDef, keywords: tuple[str, ...]) -> Warned | None:
    missing = [name for name in keywords if name not in _parameters(function)]
    if function.args.kwarg is not None or not missing:
        return None
    return Warned(
        f"{path}:{function.lineno}",
        f"{function.name} takes no **kwargs, and the patched host calls a TIS hook with "
        f"{', '.join(missing)}, a TypeError: add **kwargs",
    )
