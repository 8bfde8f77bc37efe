"""Hooks of other people that a patched host would call with a keyword that they do not take."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from slime_ext.errors import DataError
from slime_ext.host.contract import REQUIRED
from slime_ext.tools.patching.edit import Function, functions, parameters
from slime_ext.tools.scripts.modules import file_of

SIGNATURE = set(REQUIRED)  # the call is by keyword: a hook without **kwargs has exactly these names
SKIPPED = {".git", ".venv", "venv", "node_modules", "__pycache__", "build"}


def in_tree(root: Path, keywords: tuple[str, ...]) -> list[str]:
    """A warning for every function under ``root`` with a TIS hook's signature that does not take
    ``keywords``."""
    files = (path for path in sorted(root.rglob("*.py")) if not SKIPPED & {*path.relative_to(root).parts})
    hooks = ((path, function) for path in files for function in _functions(path, SIGNATURE))
    return [line for hook in hooks if parameters(hook[1]) >= SIGNATURE for line in _refused(*hook, keywords)]


def by_path(dotted: str, root: Path, keywords: tuple[str, ...]) -> list[str]:
    """A warning if the function that ``--custom-tis-function-path`` names does not take all ``keywords``.
    Nothing is imported: its file is read."""
    module, _, name = dotted.rpartition(".")
    path = file_of(module, [root, Path.cwd(), *(Path(entry or ".") for entry in sys.path)])
    named = [function for function in _functions(path, {name}) if function.name == name] if path else []
    if not named:
        what = f"{path} defines no function '{name}'" if path else f"no file of module '{module}' found"
        return [f"warning: --custom-tis-function-path {dotted}: {what}, so its signature is not checked"]
    return [line for function in named for line in _refused(path, function, keywords)]


def _functions(path: Path, mentioned: set[str]) -> list[Function]:
    """Those of a file; none of one that cannot be read, or lacks one of the names."""
    try:
        source = path.read_bytes()
        return functions(source, str(path)) if all(name.encode() in source for name in mentioned) else []
    except (OSError, DataError):
        return []


def _refused(path: Path, function: Function, keywords: tuple[str, ...]) -> Iterator[str]:
    missing = [name for name in keywords if name not in parameters(function)]
    if missing and function.args.kwarg is None:
        yield (
            f"warning: {path}:{function.lineno}: {function.name} takes no **kwargs, and the patched host "
            f"calls a TIS hook with {', '.join(missing)}, a TypeError: add **kwargs"
        )
