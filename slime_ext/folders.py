"""Folders for what a command writes."""

from __future__ import annotations

import os
from pathlib import Path

from slime_ext.errors import ConfigError


def working_folder() -> Path:
    """The working directory.

    Raises:
        ConfigError: it was removed.
    """
    try:
        return Path.cwd()
    except OSError:
        raise ConfigError(
            "working directory: expected one that exists, got a removed one: cd to another"
        ) from None


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it; never one at the root.

    Raises:
        ConfigError: nothing above it exists but the root, or it cannot be made or written to.
    """
    beginning = Path(*folder.absolute().parts[:2])
    if not beginning.exists():
        raise ConfigError(
            f"{folder}: expected a folder below one that exists, got none at {beginning}: a variable that is "
            "not set?"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = "" if os.access(folder, os.W_OK | os.X_OK) else "one that this user may not write to"
    except OSError as error:
        found = "a file" if folder.is_file() else str(error.strerror)
    if found:
        raise ConfigError(f"{folder}: expected a folder to write to, got {found}: name another")
