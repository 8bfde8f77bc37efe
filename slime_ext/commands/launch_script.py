"""A launch script of slime or miles -> the flags and the environment of its launch, without running the
script."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import dropwhile, pairwise
from pathlib import Path

from slime_ext.commands.python_script import command_of
from slime_ext.commands.shell import (
    ASSIGNED,
    BEFORE_ASSIGNMENT,
    DEEPEST,
    EXPANDED,
    Shell,
    commands_of,
    followed,
    lines_of,
)
from slime_ext.errors import ConfigError
from slime_ext.host.contract import flag_of
from slime_ext.host.flags import DECISIVE
from slime_ext.mappings import text_of
from slime_ext.without_cuda.rehearsal.launch import Launch, WrittenFlag

SLIME, EMBEDDED = "slime", "slime-ext train"
PROGRAMS = ("train.py", "train_async.py")
LAUNCHES = {**dict.fromkeys(PROGRAMS, SLIME), "slime-ext": EMBEDDED}
PYTHON = ".py"  # of miles: run with launcher utilities that only note commands
SCRIPT = (".sh", ".bash", ".zsh", ".ksh", ".slurm", ".sbatch", PYTHON, "")
MAPPING = (".yaml", ".yml", ".json")
INDIRECT = re.compile(r"\$\{!|\b(?:local|declare|typeset) -n\b|(?<![\w-])eval\s")
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
    words = words_of(path) if is_script(path) else ()
    return next((LAUNCHES[name] for name in (Path(word).name for word in words) if name in LAUNCHES), None)


def words_of(path: str) -> list[str]:
    """Shell words of a script without comments and array brackets; variables that are known replaced."""
    return followed(path, text_of(path))[1]


def launched(path: str, given: Sequence[str]) -> Launch:
    """As ``read``, of any script: with every flag of one that launches no host, or by a name of a name.

    Raises:
        ConfigError: as ``read``, or an array of flags that decide something which no launch looks at.
    """
    if Path(path).suffix != PYTHON:
        shell, words = followed(path, text := text_of(path))
        program = next((word for word in words if Path(word).name in LAUNCHES), "")
        if program:
            _forbid_unused_arrays(path, text, shell)
        if LAUNCHES.get(Path(program).name) != SLIME or INDIRECT.search(text):
            return Launch(path, program, tuple(_flags(words, {path: text})), {})
    return read(path, given, needs_model=False)


def _forbid_unused_arrays(path: str, text: str, shell: Shell) -> None:
    said, decisive = "\n".join(lines_of(text)), {flag_of(name) for name in DECISIVE}
    for name, held in shell.arrays.items():
        acts = decisive & {word.partition("=")[0] for word in held}
        if acts and not re.search(rf"\b{name}\b(?!\+?=)", said):
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
    near = [*([Path(host)] if host else []), *Path(path).resolve().parents]
    reader = _Reader(given, [root for folder in near for root in (folder, folder / "scripts")], needs_model)
    is_python = Path(path).suffix == PYTHON
    reader.follow(Path(path), command_of(path, given) if is_python else text_of(path))
    shell = reader.shell
    if not reader.program:
        raise ConfigError(f"{path}: expected a launch of {' or '.join(PROGRAMS)}, got none")
    environment = {
        name: shell.value(value)
        for block in RUNTIME.findall("\n".join(reader.files.values()))
        for name, value in PAIR.findall(block.replace('\\"', '"'))
    }
    files = {path: text_of(path)} if is_python else reader.files
    flags = tuple(_flags(reader.words, files))
    return Launch(path, reader.program, flags, environment)


class _Reader:
    """Goes through a script, and the files that it sources, as a shell would; the last launch counts, for a
    script may have one in each branch."""

    def __init__(self, given: Sequence[str], roots: Sequence[Path], needs_model: bool) -> None:
        self.given, self.roots, self.needs_model = given, roots, needs_model
        self.shell, self.files = Shell(), {}
        self.program, self.words = "", []

    def follow(self, path: Path, text: str, depth: int = 0) -> None:
        """Follows every line of a file."""
        self.files[str(path)] = text
        for line in commands_of(text, str(path)):
            for words in _clauses(line):
                if self.shell.array is None and self.shell.skips(words):
                    continue
                self.shell.assign(words)
                if self.shell.array is None:
                    self._command(path, words, depth)

    def _command(self, path: Path, words: list[str], depth: int) -> None:
        run = list(dropwhile(lambda word: word in BEFORE_ASSIGNMENT or ASSIGNED.match(word), words))
        at = next((i for i, word in enumerate(words) if Path(word).name in PROGRAMS), None)
        if run[:1] in (["source"], ["."]) and run[1:] and depth < DEEPEST:
            found = self._sourced(path, self.shell.value(run[1].rstrip(";")))
            if found is not None:
                self.follow(found, text_of(str(found)), depth + 1)
        elif at is not None and not words[0].startswith("pkill"):
            rest = words[at + 1 :]
            stop = next((i for i, word in enumerate(rest) if word in ENDS), len(rest))
            own = [w for word in rest[:stop] for w in (self.given if word in ("$@", "${@}") else [word])]
            self.program, self.words = words[at], list(self.shell.words(own))
        elif EXPANDED.match(words[0]) and self.program:
            raise ConfigError(
                f"{_where(words[0], self.files)}: expected the launch to go on, got {words[0]} as a new "
                "command: the line before it lacks the backslash at its end"
            )

    def _sourced(self, path: Path, name: str) -> Path | None:
        """The file that a script sources: as it is named, or by the end of its path below one of the roots.

        Raises:
            ConfigError: a file of a model's flags that is nowhere.

        """
        if Path(name).is_file():
            return Path(name)
        parts = [part for part in Path(name).parts if part not in ("/", "..")]
        for begin in range(len(parts)):
            for root in (path.parent, *self.roots):
                if (found := root.joinpath(*parts[begin:])).is_file():
                    return found
        if self.needs_model and "models" in parts:
            raise ConfigError(
                f"{path}: source: expected a file, got '{name}': --host DIR names the host's checkout"
            )
        return None


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
