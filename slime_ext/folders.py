"""Folders for what a command writes."""

from __future__ import annotations

from pathlib import Path

from slime_ext.errors import ConfigError


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it; never one at the root.

    Raises:
        ConfigError: nothing above it exists but the root.
    """
    beginning = Path(*folder.absolute().parts[:2])
    if not beginning.exists():
        raise ConfigError(
            f"{folder}: expected a folder below one that exists, got none at {beginning}: a variable that is "
            "not set?"
        )
    folder.mkdir(parents=True, exist_ok=True)
