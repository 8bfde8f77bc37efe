"""Imports the object at a dotted path: a function named by a flag, or a class named in YAML."""

from __future__ import annotations

import importlib
from typing import Any

from slime_ext.errors import ConfigError, did_you_mean


def load_named(path: str, where: str, kind: str) -> Any:
    """The object at ``package.module.name``.

    Args:
        where: what names it, for errors.
        kind: what it should be, for errors: ``function``, ``class``.

    Raises:
        ConfigError: not a dotted path, a module that cannot be imported, or a name that it lacks.
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
        if module_name.partition(".")[0] == "slime_ext" and ";" in str(error):
            near = "".join(str(error).partition(";")[1:])  # ours say themselves what a wrong name means
        raise ConfigError(
            f"{where}: expected a {kind} of {module_name}, got no name '{name}'{near}"
        ) from error
