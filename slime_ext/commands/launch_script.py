"""A launch script of slime or miles -> the flags and the environment of its launch, without running the
script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from slime_ext.commands.python_script import command_of
from slime_ext.commands.shell import DEEPEST, EXPANDED, Shell, commands_of, followed, lines_of, own_folder
from slime_ext.errors import ConfigError
from slime_ext.mappings import text_of
from slime_ext.without_cuda.rehearsal.launch import Launch, WrittenFlag

SLIME, EMBEDDED = "slime", "slime-ext train"
PROGRAMS = ("train.py", "train_async.py")
LAUNCHES = {**dict.fromkeys(PROGRAMS, SLIME), "slime-ext": EMBEDDED}
PYTHON = ".py"  # of miles: run with launcher utilities that only note commands
SCRIPT = (".sh", ".bash", ".zsh", ".ksh", ".slurm", ".sbatch", PYTHON, "")
MAPPING = (".yaml", ".yml", ".json")
SOURCE = re.compile(r"^\s*((?:\w+=\S+\s+)*)(?:source|\.)\s+(\S.*?)\s*;?\s*$")
RUNTIME = re.compile(r"""env_vars["'\\]+\s*:\s*\{((?:\$\{[^}]*\}|[^}])*)\}""")
PAIR = re.compile(r'"(\w+)"\s*:\s*"(.*?)"(?=\s*[,}\n]|\s*$)')
ENDS = ("|", "||", "&&", ";", "&", ">", "2>&1", ">>")


def is_script(path: str) -> bool:
    """Whether a file is a launch script rather than a mapping."""
    suffix = Path(path).suffix
    return suffix in SCRIPT or (suffix not in MAPPING and _names_a_shell(path))


def _names_a_shell(path: str) -> bool:
    try:
        with Path(path).open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def launcher_of(path: str) -> str | None:
    """Which launcher a script starts; None for a YAML file, and for a script that starts neither."""
    if Path(path).suffix == PYTHON:
        return SLIME
    words = words_of(path, text_of(path)) if is_script(path) else ()
    return next((LAUNCHES[name] for name in (Path(word).name for word in words) if name in LAUNCHES), None)


def words_of(path: str, text: str) -> list[str]:
    """Shell words of a script without comments and array brackets; variables that are known replaced."""
    return followed(path, text)[1]


def forbid_unused_arrays(path: str, text: str, acts: Callable[[str], bool]) -> None:
    """Stops at an array of flags that a script with a launch never looks at.

    Args:
        acts: whether a flag is one that has to reach the launch.

    Raises:
        ConfigError: naming the array.
    """
    shell, words = followed(path, text)
    if not any(Path(word).name in LAUNCHES for word in words):
        return
    said = "\n".join(lines_of(text))
    for name, held in shell.arrays.items():
        if any(acts(word.partition("=")[0]) for word in held) and not re.search(rf"\b{name}\b(?!\+?=)", said):
            raise ConfigError(
                f'{path}: {name}: expected "${{{name}[@]}}" in the launch, got none: its flags reach nothing'
            )


def read(
    path: str, given: Sequence[str] = (), host: str | None = None, *, needs_model: bool = True
) -> Launch:
    """The launch that a script makes: of the shell, or of Python in miles' manner.

    Args:
        given: flags of the script's own, which a shell would have as ``$@``.
        host: a checkout in which a file that it sources is looked for, beside its own folders.
        needs_model: whether a file of a model's flags that it sources has to be there.

    Raises:
        ConfigError: the script cannot be read, sources a file that is not there, or launches nothing.

    """
    if Path(path).suffix == ".py":
        files = {path: text_of(path)}
        return launch_of(path, command_of(path, given), files)
    files = {}
    near = [*([Path(host)] if host else []), *Path(path).resolve().parents]
    roots = [root for folder in near for root in (folder, folder / "scripts")]
    return launch_of(path, _with_sourced(Path(path), roots, files, needs_model), files, given)


def launch_of(path: str, text: str, files: Mapping[str, str], given: Sequence[str] = ()) -> Launch:
    """The launch of a script's text.

    Args:
        files: texts by path, in which the line of a flag is looked for.

    Raises:
        ConfigError: nothing in it launches train.py or train_async.py.

    """
    shell = Shell()
    program, words = _run(files, shell, commands_of(lines_of(text)), given)
    if program is None:
        raise ConfigError(f"{path}: expected a launch of {' or '.join(PROGRAMS)}, got none")
    environment = {
        name: shell.value(value)
        for block in RUNTIME.findall(text)
        for name, value in PAIR.findall(block.replace('\\"', '"'))
    }
    flags = tuple(_flags(words, files))
    return Launch(path, program, flags, environment, tuple(dict.fromkeys(shell.guessed)))


def _run(
    files: Mapping[str, str], shell: Shell, commands: Iterator[list[str]], given: Sequence[str]
) -> tuple[str | None, list[str]]:
    """The last launch: its program and words; a script may have one in each branch."""
    launched: tuple[str | None, list[str]] = (None, [])
    for words in (clause for line in commands for clause in _clauses(line)):
        if shell.array is None and shell.skips(words):
            continue
        shell.assign(words)
        at = next((i for i, word in enumerate(words) if Path(word).name in PROGRAMS), None)
        if shell.array is None and at is not None and not words[0].startswith("pkill"):
            rest = words[at + 1 :]
            stop = next((i for i, word in enumerate(rest) if word in ENDS), len(rest))
            own = [w for word in rest[:stop] for w in (given if word in ("$@", "${@}") else [word])]
            launched = words[at], list(shell.words(own))
        elif shell.array is None and EXPANDED.match(words[0]) and launched[0]:
            raise ConfigError(
                f"{_where(words[0], files)}: expected the launch to go on, got {words[0]} as a new command: "
                "the line before it lacks the backslash at its end"
            )
    return launched


def _clauses(words: Sequence[str]) -> Iterator[list[str]]:
    """A line cut before each ``then``, ``else``, ``elif`` and ``fi``."""
    cuts = [i for i, word in enumerate(words) if i and word.rstrip(";") in ("then", "else", "elif", "fi")]
    for begin, end in zip([0, *cuts], [*cuts, len(words)], strict=True):
        yield list(words[begin:end])


def _flags(words: Sequence[str], files: Mapping[str, str]) -> Iterator[WrittenFlag]:
    begins = [i for i, word in enumerate(words) if word.startswith("--") and len(word) > 2]
    for begin, end in pairwise([*begins, len(words)]):
        name, has_value, value = words[begin].partition("=")
        values = ([value] if has_value else []) + list(words[begin + 1 : end])
        yield WrittenFlag(name, tuple(values), _where(name, files))


def _where(name: str, files: Mapping[str, str]) -> str:
    """``file:line`` of a flag's last mention outside comments, or the script's name."""
    mention = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
    for path, text in files.items():
        found = [i for i, line in enumerate(text.splitlines(), 1) if mention.search(line.partition("#")[0])]
        if found:
            return f"{Path(path).name}:{found[-1]}"
    return Path(next(iter(files), "the script")).name


def _with_sourced(
    path: Path, roots: Sequence[Path], files: dict[str, str], needs_model: bool, depth: int = 0
) -> str:
    """A script's text with every file that it sources in its place."""
    text = files[str(path)] = text_of(str(path))
    shell, lines = Shell(), []
    for line in own_folder(text, str(path)).splitlines():
        match = SOURCE.match(line)
        if match is None or depth == DEEPEST:
            shell.assign(next(commands_of([line]), []))
            shell.array = None
            lines.append(line)
            continue
        found = _sourced(path, shell.value(match[2].strip("\"'")), roots, needs_model)
        lines += shlex.split(match[1])
        if found is not None:
            lines.append(_with_sourced(found, roots, files, needs_model, depth + 1))
    return "\n".join(lines)


def _sourced(path: Path, name: str, roots: Sequence[Path], needs_model: bool) -> Path | None:
    """The file that a script sources: as it is named, or by the end of its path below one of the roots.

    Raises:
        ConfigError: a file of a model's flags that is nowhere.

    """
    if Path(name).is_file():
        return Path(name)
    parts = [part for part in Path(name).parts if part not in ("/", "..")]
    for begin in range(len(parts)):
        for root in (path.parent, *roots):
            if (found := root.joinpath(*parts[begin:])).is_file():
                return found
    if needs_model and "models" in parts:
        raise ConfigError(
            f"{path}: source: expected a file, got '{name}': --host DIR names the host's checkout"
        )
    return None
