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


def config_file(launch: Launch, path: str) -> tuple[str, str, list[str]]:
    """Reads the file as it is on disk.

    A relative path starts at the folder in which the program runs: the script's ``cd``, else the host's
    checkout that contains the script, else the working directory of this command. A script's relative ``cd``
    starts there, too.

    Args:
        path: the path of the file, as the launch names it.

    Returns:
        The file's name for messages and its text, both empty without a file, or if there is none yet and the
        script may write it; and a line for each reason why the run may read another text.

    Raises:
        ConfigError: the file does not exist, the script may not see it, or its path is unknown.
    """
    flag, word = launch.flag(FLAG), launch.value(FLAG)
    if isinstance(word, Unread):
        raise ConfigError(
            f"{launch.script}: {FLAG}: expected a path that the script itself writes, got '{cut(word)}': run "
            f"slime-ext check FILE --args {launch.script} with the path as FILE"
        )
    if not path:
        return "", "", []
    doubts, file = list[str](), launch.runs_in / str(path)
    if flag:
        name = cut(flag.instead or word)
        doubts = [f"{place} may change {name} before the launch" for place in launch.edits]
        if _is_in_unknown_folder(launch, word):
            folder = f"{cut(launch.folder)} is known only where the script runs"
            doubts.append(f"{flag.where}: {name} is read in {launch.runs_in}, and {folder}")
    if launch.edits and not _exists(file):
        return "", "", doubts
    # Messages must not show a path of a variable or of another file.
    is_hidden = bool(launch.folder_instead or (flag and flag.instead))
    _require_visible(launch, path, file, "the path that it names" if is_hidden else str(file))
    name = str(flag) if is_hidden else str(file)
    return name, text_of(str(file), name), doubts


def _require_visible(launch: Launch, path: str, file: Path, place: str) -> None:
    """Raises ConfigError unless there is a file that the script may see.

    Args:
        place: the file's path for messages.
    """
    where, beside = f"{launch.script}: {FLAG}", f"run slime-ext check FILE --args {launch.script} with"
    if _exists(file) and not is_file(file):
        got = "a folder" if is_folder(file) else "a device, a pipe or a socket"
        raise ConfigError(f"{where}: expected a file, got {got} at {place}: name a YAML file")
    if not is_file(file) and _is_in_unknown_folder(launch, path):
        raise ConfigError(
            f"{where}: expected a working directory that the script itself names, got {cut(launch.folder)}: "
            f"{beside} the path as FILE"
        )
    if not is_file(file):
        raise ConfigError(
            f"{where}: expected a file where the script runs, got no {cut(path)} in "
            f"{launch.folder_instead or launch.runs_in}: run slime-ext there, or write the path relative to "
            "the script's folder"
        )
    if not Visible([*filter(None, [launch.own_folder]), Path.cwd()]).is_file(file):
        raise ConfigError(
            f"{where}: expected a file below the script's checkout or the working directory, got "
            f"{cut(path)}: {beside} that file as FILE"
        )


def _exists(path: Path) -> bool:
    with suppress(OSError):
        return path.exists()
    return False


def _is_in_unknown_folder(launch: Launch, path: str) -> bool:
    """Whether a path starts at a folder that is unknown."""
    return isinstance(launch.folder, Unread) and not Path(path).is_absolute()
