"""Imports the object at a dotted path.

A flag names a function by such a path, and a YAML file names a class.
"""

from __future__ import annotations

import importlib
from typing import Any

from slime_ext.errors import ConfigError, did_you_mean


def load_named(path: str, where: str, kind: str) -> Any:
    """Imports the object at ``package.module.name``.

    Args:
        where: the flag or key that names it, for messages.
        kind: what it should be, for messages: ``function`` or ``class``.

    Raises:
        ConfigError: the path is not dotted, the module cannot be imported, or it lacks the name.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name or "/" in path or ":" in path:
        raise ConfigError(
            f"{where}: expected package.module.{kind}, got one with / or :, or without a dot: use dots only"
        )
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # SystemExit: the module is a script that runs when imported
        reason = str(error).splitlines()[0] if str(error) else ""
        raise ConfigError(
            f"{where}: expected a module that imports, got {type(error).__name__}: {reason}"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError as error:
        near = did_you_mean(name, (n for n in dir(module) if not n.startswith("_")))
        if module_name.partition(".")[0] == "slime_ext" and ";" in str(error):
            near = "".join(str(error).partition(";")[1:])  # our modules say what to write in place of a name
        raise ConfigError(
            f"{where}: expected a {kind} of {module_name}, got no name '{name}'{near}"
        ) from error
