"""The file of --custom-config-path where a launch runs."""

from __future__ import annotations

from pathlib import Path

from slime_ext.config.files import text_of
from slime_ext.errors import ConfigError, cut
from slime_ext.tools.folders import is_file
from slime_ext.tools.scripts.launch import Launch, Unread
from slime_ext.tools.scripts.visible import Visible

FLAG = "--custom-config-path"


def config_file(launch: Launch, path: str) -> tuple[str, str]:
    """How messages name the file, and its text; two empty texts where a launch names none.

    The file lies in the folder in which the program runs: the script's ``cd``, the host's checkout that the
    script lies in, else the working directory of this command. Of a script only files are read that it may
    see.

    Args:
        path: of the file, as the launch names it.

    Raises:
        ConfigError: there is none, the script may not see it, or its path or text is unknown.
    """
    _forbid_unknown(launch)
    if not path:
        return "", ""
    where = f"{launch.script}: {FLAG}"
    if path in launch.veiled:
        raise ConfigError(
            f"{where}: expected a text that the script itself says, got one with parts of another file or of "
            f"a variable: slime-ext check FILE --args {launch.script} checks a copy of it"
        )
    if (text := launch.files.get(path)) is not None:
        return path, text
    folder = Path(launch.folder or launch.root or Path.cwd())
    file = folder / str(path)
    if not is_file(file):
        shown = "the folder that it changes to" if str(folder) in launch.veiled else folder
        raise ConfigError(
            f"{where}: expected a file where the script runs, got no {cut(path)} in {shown}: run slime-ext "
            "there, or name it from the script's own folder"
        )
    if not Visible([*filter(None, [launch.own_folder]), Path.cwd()]).is_file(file):
        raise ConfigError(
            f"{where}: expected a file below the script's checkout or the working directory, got "
            f"{cut(path)}: slime-ext check FILE --args {launch.script} reads it"
        )
    flag = launch.flag(FLAG)
    is_veiled = str(folder) in launch.veiled or (flag and flag.instead)
    name = str(flag) if is_veiled else str(file)
    return name, text_of(str(file), name)


def _forbid_unknown(launch: Launch) -> None:
    path = launch.value(FLAG)
    if isinstance(path, Unread):
        raise ConfigError(
            f"{launch.script}: {FLAG}: expected a path that the script itself says, got '{cut(path)}': "
            f"slime-ext check FILE --args {launch.script} checks the file with its flags"
        )
    if isinstance(launch.files.get(path), Unread):
        raise ConfigError(
            f"{launch.script}: {cut(path)}: expected a text that the script itself says, got one that "
            f"depends on the machine: slime-ext check FILE --args {launch.script} checks a copy of it"
        )
