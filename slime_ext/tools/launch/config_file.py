"""Reads the file of --custom-config-path that a launch would read."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from slime_ext.config.files import text_of
from slime_ext.errors import ConfigError, cut
from slime_ext.tools.folders import is_file, is_folder
from slime_ext.tools.launch.launch import Launch, Unread
from slime_ext.tools.launch.visible import Visible

FLAG = "--custom-config-path"


def config_file(launch: Launch, path: str) -> tuple[str, str]:
    """Returns the file's name for messages, and its text as it is on disk.

    Both are empty without a file, or if there is none yet and the script may write it.

    A relative path starts at the folder in which the program runs: the script's ``cd``, else the host's
    checkout that contains the script, else the working directory of this command. A script's relative ``cd``
    starts there, too; ``doubt_of_folder`` says if the script's folder is unknown. A file that the script may
    not see is not read.

    Args:
        path: the path of the file, as the launch names it.

    Raises:
        ConfigError: the file does not exist, the script may not see it, or its path is unknown.
    """
    where = f"{launch.script}: {FLAG}"
    if isinstance(launch.value(FLAG), Unread):
        raise ConfigError(
            f"{where}: expected a path that the script itself writes, got '{cut(launch.value(FLAG))}': "
            f"run slime-ext check FILE --args {launch.script} with the path as FILE"
        )
    if not path:
        return "", ""
    file = launch.runs_in / str(path)
    if not is_file(file) and launch.edits and not _exists(file):
        return "", ""
    if not is_file(file):
        raise _not_a_file(launch, path, file)
    if not Visible([*filter(None, [launch.own_folder]), Path.cwd()]).is_file(file):
        raise ConfigError(
            f"{where}: expected a file below the script's checkout or the working directory, got "
            f"{cut(path)}: run slime-ext check FILE --args {launch.script} with that file as FILE"
        )
    name = str(launch.flag(FLAG)) if _is_veiled(launch) else str(file)
    return name, text_of(str(file), name)


def _not_a_file(launch: Launch, path: str, file: Path) -> ConfigError:
    """Returns the error for a path at which there is no file."""
    where = f"{launch.script}: {FLAG}"
    if _exists(file):
        got = "a folder" if is_folder(file) else "a device, a pipe or a socket"
        place = "the path that it names" if _is_veiled(launch) else file
        return ConfigError(f"{where}: expected a file, got {got} at {place}: name a YAML file")
    if _folder_counts(launch, path):
        return ConfigError(
            f"{where}: expected a working directory that the script itself names, got "
            f"{cut(launch.folder)}: run slime-ext check FILE --args {launch.script} with the path as FILE"
        )
    folder = launch.folder_instead or launch.runs_in
    return ConfigError(
        f"{where}: expected a file where the script runs, got no {cut(path)} in {folder}: run slime-ext "
        "there, or write the path relative to the script's folder"
    )


def _exists(path: Path) -> bool:
    with suppress(OSError):
        return path.exists()
    return False


def _is_veiled(launch: Launch) -> bool:
    """Whether the path of the file must not be place."""
    flag = launch.flag(FLAG)
    return bool(launch.folder_instead or (flag and flag.instead))


def doubts_of_file(launch: Launch) -> list[str]:
    """Returns a line for each reason why the launch may read another text than the one on disk here."""
    flag, path = launch.flag(FLAG), launch.value(FLAG)
    if not flag:
        return []
    name = cut(flag.instead or path)
    lines = [f"{place} may change {name} before the launch" for place in launch.edits]
    if _folder_counts(launch, path):
        folder = f"{cut(launch.folder)} is known only where the script runs"
        lines.append(f"{flag.where}: {name} is read in {launch.runs_in}, and {folder}")
    return lines


def _folder_counts(launch: Launch, path: str) -> bool:
    """Whether a path starts at a folder that is unknown."""
    return isinstance(launch.folder, Unread) and not Path(path).is_absolute()
