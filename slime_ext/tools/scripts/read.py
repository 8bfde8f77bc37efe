"""A launch script of slime or miles -> its ``Launch``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from slime_ext.config.files import text_of
from slime_ext.errors import ConfigError, cut
from slime_ext.host.contract import flag_of
from slime_ext.host.flags import DECISIVE
from slime_ext.tools.folders import is_file, is_folder
from slime_ext.tools.scripts import python_script
from slime_ext.tools.scripts.launch import Launch
from slime_ext.tools.scripts.reading import Reading
from slime_ext.tools.scripts.sandbox import Sandbox
from slime_ext.tools.scripts.surroundings import Surroundings
from slime_ext.tools.scripts.trace import MAPPING, PROGRAMS

PYTHON = ".py"
SCRIPT = (".sh", ".bash", ".zsh", ".ksh", ".slurm", ".sbatch", PYTHON, "")
ARRAY = re.compile(r"(?:\w+ (?:-\w+ )?)?(\w+)\+?=\((.*)\)", re.DOTALL)  # as bash traces one that is set


def is_script(path: str) -> bool:
    """Whether a file is a launch script rather than a mapping."""
    suffix = Path(path).suffix
    return suffix in SCRIPT or (suffix not in MAPPING and _names_a_shell(path))


def _names_a_shell(path: str) -> bool:
    try:
        return is_file(path) and text_of(path).startswith("#!")
    except ConfigError:
        return False


def host_root(path: str) -> Path | None:
    """The checkout of slime or miles that a file lies in."""
    for folder in Path(path).resolve().parents:
        if is_file(folder / "train.py") and any(is_folder(folder / kind) for kind in ("slime", "miles")):
            return folder
    return None


def followed(
    path: str, given: Sequence[str] = (), checkout: Path | None = None, *, run: bool = False
) -> Reading:
    """Runs a script until it makes a launch.

    Args:
        given: flags of the script's own, which a shell would have as ``$@``.
        checkout: the host's, which files of its container are read from.
        run: whether a Python launcher may be executed.

    Raises:
        ConfigError: the script cannot be read, or has line ends that bash takes for a part of a word.
    """
    is_python = Path(path).suffix == PYTHON
    if is_python and not run:
        python_script.forbid(path)
    text = python_script.command_of(path, given) if is_python else None
    root = host_root(path)
    roots = [root, Path.cwd()] if root else [Path.cwd()]
    return Reading(Sandbox(Surroundings(path, text, roots, checkout or root), given))


def read(path: str, given: Sequence[str] = (), checkout: Path | None = None, *, run: bool = False) -> Launch:
    """The launch that a script makes; one without a program or flags where it makes none.

    Args:
        given, checkout, run: as for ``followed``.

    Raises:
        ConfigError: the script cannot be read, ends its launch too early, or gives its flags to nothing.
    """
    reading = followed(path, given, checkout, run=run)
    if reading.started is None:
        return _without_launch(path, reading)
    _forbid_lost_arrays(reading)
    _forbid_unused_arrays(reading)
    return reading.launch(path)


def _without_launch(path: str, reading: Reading) -> Launch:
    if reading.run.error:
        raise ConfigError(f"{path}: expected a script that ends, got none: {cut(reading.run.error)}")
    notes: tuple[str, ...] = ()
    if end := reading.around.end_of(reading.run):
        where = f"{Path(end[0].path).name}:{end[1]}"
        notes = (f"it ends at {where}: give it what it asks for, as variables, or as flags behind --",)
    return Launch(path, notes=notes)


def _array(text: str) -> tuple[str, list[str]]:
    """The array that a traced command sets, and the words that it gives to it."""
    match = ARRAY.fullmatch(text)
    try:
        return (match[1], shlex.split(match[2])) if match else ("", [])
    except ValueError:
        return "", []


def _forbid_lost_arrays(reading: Reading) -> None:
    for line in reading.run.lines:
        if line.words[:1] and line.words[0].startswith("--"):
            raise ConfigError(
                f"{line.place}: expected the launch to go on, got {cut(line.words[0])} as a new command: the "
                "line before it lacks the backslash at its end"
            )


def _forbid_unused_arrays(reading: Reading) -> None:
    """Raises ConfigError for an array whose flags decide whether ours runs, and never reach the launch."""
    decisive = {flag_of(name) for name in DECISIVE}
    for line in reading.run.lines:
        name, words = _array(line.text)
        acts = decisive & {word.partition("=")[0] for word in words}
        if acts and (got := _misused(name, words, acts, reading)):
            right = f'"${{{name}[@]}}"'
            raise ConfigError(
                f"{reading.around.path}: {name}: expected {right} in the launch, got {got}: its flags do not "
                "reach it"
            )


def _misused(name: str, words: Sequence[str], flags: Collection[str], reading: Reading) -> str:
    """How a script names an array in place of ``"${NAME[@]}"``: not at all (``none``), without the dollar,
    which leaves the name itself, as ``"${NAME[*]}"``, which is one word, or as ``$NAME``, which is the first
    word; empty where it does right."""
    text, launched = reading.around.text, reading.started.words if reading.started else ()
    left = re.compile(rf"\{{?{name}(\[[@*]\])?\}}?")
    if word := next((word for word in launched if left.fullmatch(word)), ""):
        return word
    if len(words) > 1 and " ".join(words) in launched:
        return f'"${{{name}[*]}}"'
    if not re.search(rf"(?<!\w){name}(?!\w|\+?=)", text):
        return "none"
    first = re.search(rf"\${name}(?!\w)(\[[@*]\])?|\$\{{{name}\}}", text)
    given = {word.partition("=")[0] for word in launched}
    is_whole = re.search(rf"\$\{{{name}\[[@*]\]", text) or flags <= given
    return first[0] if first and not is_whole else ""


def launch_of(path: str, given: Sequence[str] = (), host: str | None = None) -> Launch:
    """As ``read``, of a script that has to start a host. A Python launcher is executed, as the launch is.

    Args:
        host: its checkout; the one that the script lies in by default.

    Raises:
        ConfigError: as ``read``, or it launches nothing.
    """
    found = read(path, given, Path(host) if host and is_folder(host) else None, run=True)
    if not found.program:
        what = f": {'; '.join(found.notes)}" if found.notes else ""
        raise ConfigError(f"{path}: expected a launch of {' or '.join(PROGRAMS)}, got none{what}")
    return found
