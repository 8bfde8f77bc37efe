"""Looks up what Python files define without importing them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from slime_ext.errors import did_you_mean
from slime_ext.tools.folders import is_file, is_folder


def file_of(module: str, folders: Iterable[Path]) -> Path | None:
    """Returns the file in one of the folders from which Python would import a module."""
    stems = (folder.joinpath(*module.split(".")) for folder in folders)
    files = (file for stem in stems for file in (stem.parent / f"{stem.name}.py", stem / "__init__.py"))
    return next((file for file in files if module and is_file(file)), None)


def fault_of(path: str, folders: Sequence[Path]) -> str | None:
    """Returns what is wrong with ``package.module.name``, judged by the files in some folders.

    None means that nothing is wrong, or that none of the folders contains the package.
    """
    module, _, name = path.rpartition(".")
    if not module or not all(part.isidentifier() for part in path.split(".")):
        return "it is not a dotted path"
    file = file_of(module, folders)
    if file is None:
        return f"there is no module {module}" if is_here(path, folders) else None
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        return f"{file.name} cannot be read: {error}"
    names = set(_defined(tree.body))
    if name in names or names & {"*", "__getattr__"} or file_of(path, folders):
        return None
    return f"{file.name} has no {name}{did_you_mean(name, names)}"


def is_here(path: str, folders: Iterable[Path]) -> bool:
    """Whether one of the folders contains the first package or module of a dotted path."""
    first = path.partition(".")[0]
    return any(is_folder(folder / first) or is_file(folder / f"{first}.py") for folder in folders)


def _defined(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yields the names that a module's statements define, including those in branches."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))
        else:
            for block in ("body", "orelse", "finalbody"):
                yield from _defined(getattr(node, block, []))
            for handler in getattr(node, "handlers", []):
                yield from _defined(handler.body)
