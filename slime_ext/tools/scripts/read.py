"""A launch script of slime or miles -> its ``Launch``: of a shell, or of Python in miles' manner."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from slime_ext.config.files import text_of
from slime_ext.errors import ConfigError, cut
from slime_ext.host.contract import flag_of
from slime_ext.host.flags import ARGUMENTS, DECISIVE
from slime_ext.tools.scripts.launch import Gap, Launch, Unread, WrittenFlag
from slime_ext.tools.scripts.python_script import command_of
from slime_ext.tools.scripts.shell import Shell
from slime_ext.tools.scripts.starts import PROGRAMS
from slime_ext.tools.scripts.state import Array, Started
from slime_ext.tools.scripts.values import Unknown, Value, is_many, known, merged_words, shown

PYTHON = ".py"  # of miles: run with launcher utilities that only note commands
SCRIPT = (".sh", ".bash", ".zsh", ".ksh", ".slurm", ".sbatch", PYTHON, "")
MAPPING = (".yaml", ".yml", ".json")
SWITCHES = (*(flag_of(n) for n, a in ARGUMENTS.items() if a.kind.parse is None), "--colocate")
LIMIT_S = 20.0
OURS = "slime-ext"  # whose sub-command train starts a host itself


def is_script(path: str) -> bool:
    """Whether a file is a launch script rather than a mapping."""
    suffix = Path(path).suffix
    return suffix in SCRIPT or (suffix not in MAPPING and _names_a_shell(path))


def _names_a_shell(path: str) -> bool:
    try:
        return Path(path).is_file() and text_of(path).startswith("#!")
    except ConfigError:
        return False


def host_root(path: str) -> Path | None:
    """The checkout of slime or miles that a file lies in."""
    for folder in Path(path).resolve().parents:
        if (folder / "train.py").is_file() and any((folder / kind).is_dir() for kind in ("slime", "miles")):
            return folder
    return None


def followed(
    path: str, given: Sequence[str] = (), text: str | None = None, checkout: Path | None = None
) -> Shell:
    """The shell that has followed a script to its end.

    Args:
        text: the script's, where it is not the file's.
        checkout: as ``Shell`` has it.

    Raises:
        ConfigError: the script cannot be read, or has line ends that bash takes for a part of a word.
    """
    if text is None:
        text = text_of(path)
        _forbid_carriage_returns(path, text)
        _forbid_syntax_errors(path, text)
    root = host_root(path)
    shell = Shell(path, given, [*([root] if root else []), Path.cwd()], checkout)
    shell.follow(path, text)
    return shell


def _forbid_carriage_returns(path: str, text: str) -> None:
    for number, line in enumerate(text.split("\n"), 1):
        if line.endswith("\r") and not line.lstrip().startswith("#"):
            raise ConfigError(
                f"{Path(path).name}:{number}: expected lines that end in \\n, got \\r\\n, whose \\r bash "
                f"takes for a part of the line's last word: sed -i 's/\\r$//' {path}"
            )


def _forbid_syntax_errors(path: str, text: str) -> None:
    """Has bash look at the grammar, where there is one; it runs nothing of the script."""
    bash = shutil.which("bash")
    if bash is None or Path(path).suffix in (".zsh", ".ksh"):
        return
    run = subprocess.run(
        [bash, "-n", "-s"], input=text.encode(), env={}, capture_output=True, timeout=LIMIT_S
    )
    if run.returncode:
        said = run.stderr.decode(errors="replace").splitlines()[0].partition(": ")[2]
        raise ConfigError(f"{path}: expected a script that bash can read, got {cut(said)}")


def read(path: str, given: Sequence[str] = (), checkout: Path | None = None) -> Launch:
    """The launch that a script makes; without a program where it makes none, and then with the flags of all
    of its words, for another script can source it.

    Args:
        given: flags of the script's own, which a shell would have as ``$@``.
        checkout: the host's, which files of it that are not where the script has them are read from.

    Raises:
        ConfigError: the script cannot be read, ends its launch too early, or gives its flags to nothing.
    """
    is_python = Path(path).suffix == PYTHON
    shell = followed(path, given, command_of(path, given) if is_python else None, checkout)
    files = {path: text_of(path)} if is_python else shell.files
    _forbid_lost_arrays(shell)
    if not shell.state.started:
        return _without_launch(path, shell, files)
    _forbid_unused_arrays(path, shell)
    started, words, notes = that_counts(list(shell.state.started.values()))
    flags, gaps = _flags(words, files)
    notes += tuple(shell.notes) + tuple(
        f"{place}: ${name} is set by nothing here, and without it the script ends"
        for name, place in shell.needs.items()
    )
    broken = tuple(Gap(len(flags), text.text, text.where) for text in shell.broken)
    return Launch(
        path,
        started.program,
        flags,
        dict(started.environment),
        (*gaps, *broken),
        known(started.folder),
        notes,
    )


def that_counts(started: list[Started]) -> tuple[Started, list[Value], tuple[str, ...]]:
    """The last launch of a script, with what is unknown where others may be made in its place."""
    last, words = started[-1], list(started[-1].words)
    notes = []
    for other in reversed(started[:-1]):
        if last.only_if is None:
            notes.append(
                f"{last.where}: the launch that is read; the script makes another one at {other.where}"
            )
            break
        words = merged_words(list(other.words), words, last.only_if)
        if other.only_if is None:
            break
    return last, words, tuple(notes)


def _without_launch(path: str, shell: Shell, files: Mapping[str, str]) -> Launch:
    flags, gaps = _flags(shell.words, files)
    said = [known(word) for word in shell.words]
    pairs = pairwise(Path(word or "").name for word in said)
    notes = ("slime-ext train writes the flags of its host itself",) if (OURS, "train") in pairs else ()
    if shell.ended:
        notes += (f"it ends at {shell.ended}: give it what it asks for, as variables, or as flags behind --",)
    return Launch(path, "", flags, {}, gaps, None, notes)


def _forbid_lost_arrays(shell: Shell) -> None:
    if shell.lost and shell.state.started:
        where, _, name = shell.lost[0].partition("\0")
        raise ConfigError(
            f"{where}: expected the launch to go on, got {name} as a new command: the line before it lacks "
            "the backslash at its end"
        )


def _forbid_unused_arrays(path: str, shell: Shell) -> None:
    decisive = {flag_of(name) for name in DECISIVE}
    for name, held in shell.state.variables.items():
        if isinstance(held, Array) and name not in shell.read:
            acts = decisive & {(known(word) or "").partition("=")[0] for word in held.words}
            if acts:
                raise ConfigError(
                    f'{path}: {name}: expected "${{{name}[@]}}" in the launch, got none: its flags reach '
                    "nothing"
                )


def _flags(
    words: Sequence[Value], files: Mapping[str, str]
) -> tuple[tuple[WrittenFlag, ...], tuple[Gap, ...]]:
    """Flags with their values, and the gaps between them."""
    flags: list[WrittenFlag] = []
    gaps: list[Gap] = []
    for word in words:
        text = shown(word) if _is_exact(word) else Unread(shown(word))
        if word and isinstance(word[0], str) and word[0].startswith("--") and len(text) > 2:
            name, has_value, said = text.partition("=")
            flags.append(WrittenFlag(name, (type(text)(said),) if has_value else (), where(name, files)))
            continue
        if is_many(word) and not _is_unset(word):
            gaps += _gap(word, flags)
            if flags and flags[-1].values:
                continue
        if flags:
            _append(flags, text)
    return tuple(flags), tuple(gaps)


def _gap(word: Value, flags: Sequence[WrittenFlag]) -> list[Gap]:
    """The gap that an unknown number of words leaves; none where it is the value of the flag before it."""
    part = next(p for p in word if isinstance(p, Unknown) and p.many)
    last = flags[-1] if flags else None
    is_value = part.is_text and last is not None and not last.values and last.name not in SWITCHES
    leaves = part.flags if part.flags is not None else not is_value
    return [Gap(len(flags), shown(word), part.where, part.flags)] if leaves else []


def _is_unset(word: Value) -> bool:
    return bool(word) and all(isinstance(part, Unknown) and part.unset for part in word)


def _is_exact(word: Value) -> bool:
    return all(isinstance(part, str) for part in word)


def _append(flags: list[WrittenFlag], word: str) -> None:
    last = flags[-1]
    flags[-1] = WrittenFlag(last.name, (*last.values, word), last.where)


def where(name: str, files: Mapping[str, str]) -> str:
    """``file:line`` of a flag's last mention outside comments, or the script's name."""
    mention = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
    for path, text in files.items():
        found = [i for i, line in enumerate(text.splitlines(), 1) if mention.search(line.partition("#")[0])]
        if found:
            return f"{Path(path).name}:{found[-1]}"
    return Path(next(iter(files), "the script")).name


def launch_of(path: str, given: Sequence[str] = (), host: str | None = None) -> Launch:
    """As ``read``, of a script that has to start a host.

    Args:
        host: its checkout; the one that the script lies in by default.

    Raises:
        ConfigError: as ``read``, or it launches nothing.
    """
    checkout = Path(host) if host and Path(host).is_dir() else host_root(path)
    found = read(path, given, checkout)
    if not found.program:
        what = f": {'; '.join(found.notes)}" if found.notes else ""
        raise ConfigError(f"{path}: expected a launch of {' or '.join(PROGRAMS)}, got none{what}")
    return found
