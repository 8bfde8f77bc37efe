"""Checks, makes and writes the folders and files of a command."""

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
    """Returns the working directory.

    Raises:
        ConfigError: the directory was removed.
    """
    try:
        return Path.cwd()
    except OSError:
        raise ConfigError(
            "working directory: expected a folder that exists, got a removed folder: cd elsewhere"
        ) from None


def find_own_steps(mapping: Any) -> None:
    """Lets Python find the user's own steps in the working directory, if any are configured.

    The directory comes last on the path, so it cannot hide other modules.

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
    """Makes a folder and its parents, but never a folder directly below the root.

    Raises:
        ConfigError: the first folder of the path does not exist, or the folder cannot be made or written to.
    """
    beginning = Path(*folder.absolute().parts[:2])
    if not is_folder(beginning):
        raise ConfigError(
            f"{folder}: expected a folder below a folder that exists, got none at {beginning}: check whether "
            "each variable in the path is set"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fault = "" if os.access(folder, os.W_OK | os.X_OK) else "a folder that this user may not write to"
    except OSError as error:
        fault = "a file" if is_file(folder) else str(error.strerror)
    if fault:
        raise ConfigError(f"{folder}: expected a folder to write to, got {fault}: name another folder")


def new_folder(out: Path | None, default: Path) -> Path:
    """Returns the folder of a new run: `out`, or a free name after `default`.

    Raises:
        ConfigError: `out` has files in it.
    """
    if out is None:
        return free_name(default)
    if is_folder(out) and any(out.iterdir()):
        raise ConfigError(
            f"--out: expected a new or empty folder, got {out} with files in it: name another folder"
        )
    return out


def free_name(wanted: Path) -> Path:
    """Returns the first free path: `wanted`, or `wanted` followed by -2, -3 and so on."""
    number, free = 1, wanted
    while free.exists():
        number += 1
        free = wanted.with_name(f"{wanted.name}-{number}")
    return free


def refuse_link(path: Path) -> None:
    """Refuses to write through a link. Links such as /dev/stdout are allowed, because they are meant.

    Raises:
        ConfigError: the path is a link.
    """
    if path.is_symlink() and path.absolute().parts[1] not in ("dev", "proc"):
        raise ConfigError(
            f"{path}: expected a file, got a link to {path.readlink()}: name that file, or remove the link"
        )


def write_file(path: Path, content: str | bytes) -> None:
    """Writes a file completely or not at all, as ``replacing`` does. Writes directly to a pipe or a device.

    Raises:
        ConfigError: the path is a link.
        OSError: the file cannot be written.
    """
    refuse_link(path)
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    with replacing(path) as file:
        file.write(data)


def is_file(path: str | Path) -> bool:
    """Returns whether this user can see a file at the path.

    ``Path.is_file`` raises below a folder that the user may not open, such as /root in slime's launch
    scripts. This function returns False there.
    """
    with suppress(OSError):
        return Path(path).is_file()
    return False


def is_folder(path: str | Path) -> bool:
    """Returns whether this user can see a folder at the path; see ``is_file``."""
    with suppress(OSError):
        return Path(path).is_dir()
    return False
