"""Decides which files of this disk a script may see. They are below its checkout or the working directory.

The script sees the text of a shell script that it sources or starts. Of any other file it sees only that the
file exists. It sees no name that begins with a dot (.env, .git) and no target of a link that leads outside.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path

from slime_ext.config.files import text_of
from slime_ext.errors import ConfigError
from slime_ext.tools.folders import is_file, is_folder
from slime_ext.tools.launch.trace import BEGIN, BETWEEN, END, SHELL

SHEBANG = re.compile(r"#!.*\b(?:ba|z|k|da)?sh\b")
MOST_SIBLINGS = 2000
RESERVED = re.compile(f"[{BEGIN}{END}{BETWEEN}]")


class Visible:
    """The files below some folders.

    Args:
        folders: the folders; the root of the disk is ignored.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        real = (Path(os.path.realpath(folder)) for folder in folders)
        self.folders = [folder for folder in real if folder != Path("/")]

    def _is_inside(self, path: str | Path) -> bool:
        real = Path(os.path.realpath(path))
        return any(
            real.is_relative_to(folder) and not any(part[0] == "." for part in real.relative_to(folder).parts)
            for folder in self.folders
        )

    def is_file(self, path: str | Path) -> bool:
        """Whether the script may see a regular file at this path."""
        return self._is_inside(path) and is_file(path)

    def is_folder(self, path: str | Path) -> bool:
        """Whether the script may see a folder at this path."""
        return self._is_inside(path) and is_folder(path)

    def script(self, path: str | Path) -> str | None:
        """Returns the text of a shell script; None for any other path.

        Raises:
            ConfigError: as ``script_text``.
        """
        if not self.is_file(path):
            return None
        if Path(path).suffix not in SHELL:
            with Path(path).open("rb") as file:
                if not SHEBANG.match(file.readline(200).decode(errors="replace")):
                    return None
        return script_text(str(path))


def names_of(file: Path) -> set[str]:
    """Returns the names of a file, of the file that it links to, and of the links to it in their folders."""
    names = {file.name}
    with suppress(OSError):
        real = file.resolve()
        for folder in {file.parent, real.parent}:
            with os.scandir(folder) as entries:
                paths = [Path(entry.path) for entry in islice(entries, MOST_SIBLINGS)]
            names |= {path.name for path in paths if _is_same(path, real)}
    return names


def _is_same(path: Path, other: Path) -> bool:
    with suppress(OSError):
        return path.samefile(other)
    return False


def script_text(path: str) -> str:
    """Reads the text of a script.

    Raises:
        ConfigError: the file cannot be read, has \\r\\n line ends (bash would read \\r as part of a word), or
            contains the private characters that tokens are made of.
    """
    text = text_of(path)
    for number, line in enumerate(text.split("\n"), 1):
        if match := RESERVED.search(line):
            raise ConfigError(
                f"{Path(path).name}:{number}: expected a script without private characters, got U+"
                f"{ord(match[0]):04X}: delete it"
            )
        if line.endswith("\r") and not line.lstrip().startswith("#"):
            raise ConfigError(
                f"{Path(path).name}:{number}: expected lines that end in \\n, got \\r\\n, whose \\r bash "
                f"reads as part of the line's last word: run sed -i 's/\\r$//' {path}"
            )
    return text
