"""Functions that flags name by a dotted path: resolved like slime's, with errors that help."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from slime_ext.errors import ConfigError
from slime_ext.importing import load_named


def load_function(path: str, flag: str) -> Callable[..., Any]:
    """The callable at ``package.module.function``; `flag` is named in errors.

    Raises:
        ConfigError: no dotted path, a module that does not import, a name that it lacks, something not
            callable.
    """
    where = f"{flag} {path}"
    function = load_named(path, where, "function")
    if not callable(function):
        raise ConfigError(f"{where}: expected a function, got a {type(function).__name__}")
    return function


def check_call(flag: str, path: str, positional: Sequence[str], keywords: Sequence[str] = ()) -> None:
    """Imports the function at `path` and binds the host's call to its signature; calls nothing.

    Args:
        positional: what the host passes by position, by name.
        keywords: what it passes by keyword.

    Raises:
        ConfigError: as ``load_function``, or a signature that the call does not fit.
    """
    signature = _signature(load_function(path, flag))
    if signature is None:
        return
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        wanted = ", ".join(positional) if positional else f"the keywords {', '.join(keywords)}"
        hint = ": add **kwargs to it" if "unexpected keyword" in str(error) else ""
        raise ConfigError(
            f"{flag} {path}: expected a function of {wanted}, got {signature}: {error}{hint}"
        ) from error


def flag_of(dest: str) -> str:
    """The flag of an argument's name: tis_clip -> --tis-clip."""
    return "--" + dest.replace("_", "-")


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """None for what has no signature to look at, such as a builtin."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None
