"""Folders and files that a command writes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from slime_ext.errors import ConfigError
from slime_ext.replacing import replacing


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


def find_own_steps(mapping: Any) -> None:
    """Lets Python find modules in the working directory, after all other places, if a configuration names a
    step of its user's own.

    Args:
        mapping: the value of the key ``slime_ext:``.
    """
    listed = mapping.get("steps") if isinstance(mapping, Mapping) else None
    steps = listed if isinstance(listed, list | tuple) else ()
    names = [name for step in steps for name in (step if isinstance(step, Mapping) else [step])]
    if any("." in name for name in names if isinstance(name, str)):
        if (here := str(working_folder())) not in sys.path:
            sys.path.append(here)


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it; never one at the root.

    Raises:
        ConfigError: nothing above it exists but the root, or it cannot be made or written to.
    """
    beginning = Path(*folder.absolute().parts[:2])
    if not is_folder(beginning):
        raise ConfigError(
            f"{folder}: expected a folder below one that exists, got none at {beginning}: a variable that is "
            "not set?"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = "" if os.access(folder, os.W_OK | os.X_OK) else "one that this user may not write to"
    except OSError as error:
        found = "a file" if is_file(folder) else str(error.strerror)
    if found:
        raise ConfigError(f"{folder}: expected a folder to write to, got {found}: name another")


def new_folder(given: Path | None, default: Path) -> Path:
    """The folder of a new run: the one that is given, else the first free name of `default` with a number.

    Raises:
        ConfigError: the one that is given has files in it.
    """
    if given is None:
        return free_name(default)
    if is_folder(given) and any(given.iterdir()):
        raise ConfigError(
            f"--out: expected a new or empty folder, got {given} with files in it: name another"
        )
    return given


def free_name(wanted: Path) -> Path:
    """The path, or the first free one of its name with a number."""
    number, free = 1, wanted
    while free.exists():
        number += 1
        free = wanted.with_name(f"{wanted.name}-{number}")
    return free


def refuse_link(path: Path) -> None:
    """Raises if writing a file would write where a link leads; /dev/stdout and its kind are meant.

    Raises:
        ConfigError: it is a link.
    """
    if path.is_symlink() and path.absolute().parts[1] not in ("dev", "proc"):
        raise ConfigError(
            f"{path}: expected a file, got a link to {path.readlink()}: name that file, or remove the link"
        )


def write_file(path: Path, content: str | bytes) -> None:
    """Writes a file whole, as ``replacing`` does; a pipe or a device is written into.

    Raises:
        ConfigError: it is a link.
        OSError: it cannot be written.
    """
    refuse_link(path)
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    with replacing(path) as file:
        file.write(data)


def is_file(path: str | Path) -> bool:
    """Whether a file is there for this user: False, too, below a folder that others may not look into, such
    as the /root of slime's launch scripts (there ``Path.is_file`` raises)."""
    with suppress(OSError):
        return Path(path).is_file()
    return False


def is_folder(path: str | Path) -> bool:
    """As ``is_file``, of a folder."""
    with suppress(OSError):
        return Path(path).is_dir()
    return False
