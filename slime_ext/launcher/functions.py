"""Functions that flags name by a dotted path, resolved like slime's but with an error that helps."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from slime_ext.errors import ConfigError, did_you_mean


def load_function(path: str, flag: str) -> Callable[..., Any]:
    """The callable at ``package.module.function``; `flag` is named in errors.

    Raises:
        ConfigError: no dotted path, a module that does not import, a name that it lacks, something not
            callable.
    """
    where = f"{flag} {path}"
    module_name, _, name = path.rpartition(".")
    if not module_name or "/" in path or ":" in path:
        raise ConfigError(f"{where}: expected package.module.function, got something else: use dots only")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script that was meant to be run, not imported
        reason = str(error).splitlines()[0] if str(error) else ""
        raise ConfigError(
            f"{where}: expected a module that imports, got {type(error).__name__}: {reason}"
        ) from error
    try:
        function = getattr(module, name)
    except AttributeError as error:
        near = did_you_mean(name, (n for n in dir(module) if not n.startswith("_")))
        raise ConfigError(
            f"{where}: expected a function of {module_name}, got no name '{name}'{near}"
        ) from error
    if not callable(function):
        raise ConfigError(f"{where}: expected a function, got a {type(function).__name__}")
    return function
