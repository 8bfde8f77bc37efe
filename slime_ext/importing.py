"""What a dotted path names: a function of a flag, a class of a YAML file."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slime_ext.errors import ConfigError, did_you_mean


def load_named(path: str, where: str, kind: str) -> Any:
    """The object at ``package.module.name``.

    Args:
        where: what names it, for errors.
        kind: what it should be, for errors: ``function``, ``class``.

    Raises:
        ConfigError: no dotted path, a module that does not import, a name that it lacks.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name or "/" in path or ":" in path:
        raise ConfigError(f"{where}: expected package.module.{kind}, got something else: use dots only")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script that was meant to be run, not imported
        reason = str(error).splitlines()[0] if str(error) else ""
        raise ConfigError(
            f"{where}: expected a module that imports, got {type(error).__name__}: {reason}"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError as error:
        near = did_you_mean(name, (n for n in dir(module) if not n.startswith("_")))
        raise ConfigError(
            f"{where}: expected a {kind} of {module_name}, got no name '{name}'{near}"
        ) from error


def file_of(module: str, folders: Iterable[Path]) -> Path | None:
    """The file in one of the folders from which Python would import a module; nothing is imported."""
    stems = (folder.joinpath(*module.split(".")) for folder in folders)
    files = (file for stem in stems for file in (stem.parent / f"{stem.name}.py", stem / "__init__.py"))
    return next((file for file in files if module and file.is_file()), None)
