"""Opens the files of a launch: the script, its YAML files, and the checkout of the host that it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_ext.config.files import located, read_mapping, text_of
from slime_ext.errors import ConfigError, cut
from slime_ext.hosts.code import HostCode
from slime_ext.hosts.flags import check_keys
from slime_ext.tools.checkout import checkout_in
from slime_ext.tools.folders import is_file, is_folder
from slime_ext.tools.launch.launch import Launch, Unread
from slime_ext.tools.launch.read import check_launched, is_script, read_script
from slime_ext.tools.launch.visible import Visible

FLAG, DEST = "--custom-config-path", "custom_config_path"


@dataclass(frozen=True)
class Sources:
    """Holds a launch and what is in its files.

    Args:
        launch: the launch of a script; ``Launch("")`` without a script.
        file: the YAML file that a command names; empty if it names none.
        keys: name of a YAML file in messages -> its keys. Later files override earlier ones and flags.
        is_unwritten: whether the path of --custom-config-path is unknown, or nothing is there and the script
            may write it.
        doubts: why the run may read another text of that file, one line each.
        host: the code that the launch will run; None if it is not here.
    """

    launch: Launch
    file: str = ""
    keys: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    is_unwritten: bool = False
    doubts: Sequence[str] = ()
    host: HostCode | None = None


def named_sources(
    path: str,
    args_path: str | None = None,
    arguments: Sequence[str] = (),
    host: HostCode | None = None,
    *,
    run: bool = False,
    environment: Sequence[str] = (),
) -> Sources:
    """Reads the files that the words of a command name.

    Args:
        path: the launch script or the YAML file.
        args_path: the launch script whose other arguments go with a YAML ``path``.
        arguments: the arguments of the script.
        host: as for ``sources_of``.
        run: whether a Python launcher may be executed.
        environment: names of the variables that the script may see.

    Raises:
        ConfigError: a word does not fit, the script launches nothing, or a file cannot be read.
    """
    if not path:
        raise ConfigError("FILE: expected a launch script or a YAML file, got an empty name: name a file")
    script = next((file for file in (path, args_path) if file and is_script(file)), "")
    if args_path and not script:
        raise ConfigError(f"--args: expected a launch script, got {cut(args_path)}: write --args run.sh")
    if args_path and script == path:
        raise ConfigError(
            f"--args: expected a YAML file before it, got the script {cut(path)}: leave out --args"
        )
    if arguments and not script:
        raise ConfigError(
            f"{path}: expected no flags after -- with a YAML file, got {cut(arguments[0])}: leave them out"
        )
    launch = Launch("")
    if script:
        launch = check_launched(read_script(script, arguments, run=run, environment=environment), script)
    return sources_of(launch, "" if path == script else path, host)


def sources_of(launch: Launch, file: str = "", host: HostCode | None = None) -> Sources:
    """Opens the files of a launch that was read.

    Args:
        file: a YAML file that is read before the launch's own, and in its place if it has the key slime_ext.
        host: the code that the launch will run; by default the checkout whose train.py it starts.

    Raises:
        ConfigError: a file cannot be read, or has a misspelt key, which slime would ignore.
    """
    if launch.script and host is None:
        folders = ((launch.runs_in / launch.program).parent, launch.root)
        host = next((code for folder in folders if folder and (code := checkout_in(folder))), None)
    keys = {file: _keys(file)} if file else {}
    named = keys[file] if file else {}
    if "slime_ext" in named:
        return Sources(launch, file, keys, host=host)
    path = named[DEST] if DEST in named else launch.value(FLAG) if launch.is_known(FLAG) else ""
    path, doubts = path if isinstance(path, str) else "", list[str]()  # check_kinds refuses other values
    if launch.script:
        name, text, doubts = _config_file(launch, path)
    else:
        name, text = path and located(path, file), None
    if name:
        keys[name] = _keys(name, text)
    # A file that is named beside the script is the one to judge.
    return Sources(launch, file, keys, bool(path) and not name, () if file else doubts, host)


def _keys(name: str, text: str | None = None) -> dict[str, Any]:
    """Reads the keys of a file for --custom-config-path. Raises ConfigError as ``sources_of``.

    Args:
        name: the name of the file in messages; also its path if ``text`` is None.
        text: the text of the file.
    """
    keys = read_mapping(name, text)
    check_keys(name, keys)
    return keys


def _config_file(launch: Launch, path: str) -> tuple[str, str, list[str]]:
    """Reads the file as it is on disk.

    A relative path starts at the folder in which the program runs: the script's ``cd``, else the host's
    checkout that contains the script, else the working directory of this command. A script's relative ``cd``
    starts there, too.

    Args:
        path: the path of the file, as the launch names it.

    Returns:
        The file's name for messages and its text, both empty without a file, if its path is unknown, or if
        there is none yet and the script may write it; and a line for each reason why the run may read another
        text.

    Raises:
        ConfigError: the file does not exist, or the script may not see it.
    """
    flag, word = launch.flag(FLAG), launch.value(FLAG)
    if flag and isinstance(word, Unread):
        how = f"run slime-ext check FILE --args {launch.script} with the path as FILE"
        return "", "", [f"{flag.where}: what the file {cut(word)} says is not known here: {how}"]
    if not path:
        return "", "", []
    doubts, file = list[str](), launch.runs_in / path
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
    word = flag.instead if flag and flag.instead else path
    _require_visible(launch, word, file, "the path that it names" if is_hidden else str(file))
    name = str(flag) if is_hidden else str(file)
    return name, text_of(str(file), name), doubts


def _require_visible(launch: Launch, word: str, file: Path, place: str) -> None:
    """Raises ConfigError unless there is a file that the script may see.

    Args:
        word: the path as the script writes it.
        place: the file's path for messages.
    """
    where, beside = f"{launch.script}: {FLAG}", f"run slime-ext check FILE --args {launch.script} with"
    if _exists(file) and not is_file(file):
        got = "a folder" if is_folder(file) else "a device, a pipe or a socket"
        raise ConfigError(f"{where}: expected a file, got {got} at {place}: name a YAML file")
    if not is_file(file) and _is_in_unknown_folder(launch, word):
        raise ConfigError(
            f"{where}: expected a working directory that the script itself names, got {cut(launch.folder)}: "
            f"{beside} the path as FILE"
        )
    if not is_file(file):
        raise ConfigError(
            f"{where}: expected a file where the script runs, got no {cut(word)} in "
            f"{launch.folder_instead or launch.runs_in}: run slime-ext there, or write the path relative to "
            "the script's folder"
        )
    if not Visible([*filter(None, [launch.own_folder]), Path.cwd()]).is_file(file):
        raise ConfigError(
            f"{where}: expected a file below the script's checkout or the working directory, got "
            f"{cut(word)}: {beside} that file as FILE"
        )


def _exists(path: Path) -> bool:
    with suppress(OSError):
        return path.exists()
    return False


def _is_in_unknown_folder(launch: Launch, path: str) -> bool:
    """Whether a path starts at a folder that is unknown."""
    return isinstance(launch.folder, Unread) and not Path(path).is_absolute()
