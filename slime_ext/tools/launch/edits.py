"""Finds the commands of a script that may change the file of --custom-config-path before the launch.

The file is judged as it is on disk. A command counts if it names the file, a link to it or its folder, or if
it runs a program of the user's, which may do anything. Nothing is followed, and no other file is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from itertools import takewhile
from pathlib import Path

from slime_ext.tools.launch.questions import COMMENT
from slime_ext.tools.launch.surroundings import NO_SETTINGS, Surroundings, is_of_model
from slime_ext.tools.launch.trace import SHELLS, UNKNOWN, Command, Line, Run, at, program_of, shell_text
from slime_ext.tools.launch.visible import names_of

# Builtins of bash, which change no file themselves. What they run is another command.
BUILTINS = frozenset(
    ": [ [[ test echo printf export declare local readonly typeset unset cd pushd popd set shopt shift eval "
    "read mapfile readarray return exit wait sleep true false let dirname basename realpath ulimit "
    "umask".split()
)
LOOK = frozenset(
    "ls pip pip3 uv du df stat mkdir touch chmod chown which hash kill pkill pgrep".split()
)  # at a folder
EDITORS = frozenset(
    "sed perl yq awk gawk cp mv ln install rsync scp tee truncate sponge dd patch ed ex".split()
)
# Commands that change files which they do not name.
OF_A_TREE = frozenset("patch unzip tar make cmake just ninja ansible-playbook".split())
OF_GIT = frozenset("checkout switch pull reset apply restore stash am merge rebase clean cherry-pick".split())
INTERPRETER = re.compile(r"python[\d.]*|perl|ruby|node|deno|Rscript|php|lua")
INLINE = ("-c", "-e", "-pe", "-ne", "-E", "-")
MODULES = frozenset("pip sglang vllm ray torch venv http json huggingface_hub wandb".split())
SETTINGS = re.compile(r"ya?ml|glob|walk|iterdir|listdir|rglob")  # a program with these can find the file
REDIRECTED = re.compile(r">>?\|?\s*[\"']?(?:\$\(|`)")  # > $(somewhere)


def edits(around: Surroundings, runs: Sequence[Run], path: str, file: Path | None) -> list[str]:
    """Returns the places at which a script may change its configuration before the launch.

    Args:
        runs: the runs that reach a launch.
        path: the configuration's path in the sandbox.
        file: the file on this disk; None if there is none.
    """
    names = sorted({Path(path).name, *(names_of(file) if file else ())})
    places = (place for run in runs for place in _edits_of_run(around, run, path, names))
    return list(dict.fromkeys([*places, *(p for p, line in _lines(around) if REDIRECTED.search(line))]))


def _edits_of_run(around: Surroundings, run: Run, path: str, names: Sequence[str]) -> Iterator[str]:
    launches = [i for i, command in enumerate(run.commands) if program_of(command.words) is not None]
    for command in run.commands[: launches[-1]]:
        runs_others = (
            program_of(command.words) is not None or shell_text(command.words, command.stdin) is not None
        )
        if not runs_others and _may_edit(around, command, path, names):
            yield _place(around, run.lines, command, names)
    if run.changed or any(call.changed for call in run.calls):
        yield _redirected(around, names)
    for line in run.lines:
        if line.words[:1] in (["source"], ["."]) and _is_missing(around, line):
            yield around.place(line.file, line.number)


def _may_edit(around: Surroundings, command: Command, path: str, names: Sequence[str]) -> bool:
    """Whether a command names the file, a link to it or its folder, or can change what it does not name."""
    words, program = command.words, Path(command.words[0]).name
    if program in BUILTINS:
        return False
    parts = [part for word in words[1:] for part in {word, word.partition("=")[2]}]
    reads_code = program in ("xargs", "parallel", *SHELLS) or INTERPRETER.fullmatch(program)
    named = re.compile("|".join(rf"(?<![\w.-]){re.escape(name)}(?!\w)" for name in names))
    return (
        any(named.search(part) for part in (*parts, command.stdin if reads_code else ""))
        or (program not in LOOK and any(_is_above(command.folder, part, path) for part in parts))
        or any(_is_pattern_of(command.folder, part, path) for part in parts)
        or (program in EDITORS and any(UNKNOWN.search(Path(word).name) for word in words[1:] if word))
        or UNKNOWN.search(words[0]) is not None
        or program in OF_A_TREE
        or (program == "git" and any(word in OF_GIT for word in words))
        or _runs_a_program(around, command)
    )


def _is_above(folder: str, word: str, path: str) -> bool:
    """Whether a word is the path of a folder that contains the file."""
    return (
        word[:1] not in ("", "-")
        and f"{at(folder, word)}/".replace("//", "/") in f"{Path(path).parent}/"[: len(at(folder, word)) + 1]
    )


def _is_pattern_of(folder: str, word: str, path: str) -> bool:
    """Whether a word is a pattern of file names that the file matches."""
    if not re.search(r"[*?\[]", word) or "\n" in word:
        return False
    place, _, name = word.rpartition("/")
    if place or name == "*":
        return fnmatch(path, at(folder, word))
    return fnmatch(Path(path).name, name)


def _runs_a_program(around: Surroundings, command: Command) -> bool:
    """Whether a command runs a program of the user's, which may change anything."""
    words = command.words
    program = Path(words[0]).name
    if INTERPRETER.fullmatch(program):
        options = list(takewhile(lambda word: word[:1] == "-", words[1:]))
        rest = words[1 + len(options) :]
        if "-m" in options:
            return bool(rest) and rest[0].partition(".")[0] not in MODULES
        if any(option in INLINE for option in options) or not rest:
            return SETTINGS.search(" ".join([*rest, command.stdin])) is not None
        return not around.is_of_host(at(command.folder, rest[0]))
    if program in SHELLS:
        files = [word for word in words[1:] if word[:1] != "-"]
        return bool(files) and "-c" not in words and not around.is_read(at(command.folder, files[0]))
    file = at(command.folder, words[0])
    is_installed = "/bin/" in file
    return "/" in words[0] and not is_installed and not around.is_read(file) and not around.is_of_host(file)


def _is_missing(around: Surroundings, line: Line) -> bool:
    """Whether a line sources a file that is not here, and that can be more than settings."""
    name = line.words[1] if line.words[1:] else ""
    is_known = NO_SETTINGS.fullmatch(name) or is_of_model(name) or not name
    return not is_known and not around.is_read(at(line.folder, name))


def _place(around: Surroundings, lines: Sequence[Line], command: Command, names: Sequence[str]) -> str:
    """Returns ``file:line`` of a command."""
    for line in lines:
        if tuple(line.words) == command.words:
            return around.place(line.file, line.number)
    places = (around.where(word) for word in (*names, command.words[0]))
    return next((place for place in places if ":" in place), around.named(around.path))


def _redirected(around: Surroundings, names: Sequence[str]) -> str:
    """Returns the place of a redirection to the file.

    A redirection that names the file comes first, then one with a variable, then any.
    """
    lines = [(place, line) for place, line in _lines(around) if re.search(r">(?!\s*(?:&|/dev/))", line)]
    named = [place for place, line in lines if any(name in line for name in names)]
    places = named or [place for place, line in lines if "$" in line] or [place for place, _ in lines]
    return places[0] if places else around.named(around.path)


def _lines(around: Surroundings) -> Iterator[tuple[str, str]]:
    """Yields the place and the text of each line of the scripts, without comments."""
    for script, text in around.files.items():
        for number, line in enumerate(COMMENT.sub(r"\1", text).split("\n"), 1):
            yield around.place(script, number), line
