"""A launch script of slime or miles -> the flags and the environment of its launch, without running the
script.

Such scripts end every Python process of the machine before they start their own, so none of it is executed:
assignments, arrays, ``source`` and simple conditions are followed as a shell would; what only a shell can
know (the output of a command) stays as it is written.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from slime_ext.commands.python_script import command_of
from slime_ext.commands.script import ARRAY, KEPT, REFERENCE, commands_of, lines_of
from slime_ext.errors import ConfigError
from slime_ext.mappings import text_of
from slime_ext.without_cuda.rehearsal.launch import Launch, WrittenFlag

PROGRAMS = ("train.py", "train_async.py")
SOURCE = re.compile(r"^\s*((?:\w+=\S+\s+)*)(?:source|\.)\s+(\S.*?)\s*;?\s*$")
DIRNAME = re.compile(r"""\$\(\s*dirname\s+(?:--\s+)?"?\$\{?(?:BASH_SOURCE(?:\[0\])?|0)\}?"?\s*\)""")
FOLDER = re.compile(
    r"""\$\(\s*cd\s+(?:--\s+)?"?([^"$()&;]+?)"?\s*(?:&?>\s*/dev/null\s*(?:2>&1)?)?\s*&&\s*pwd[^)]*\)"""
)
ASSIGNED = re.compile(r"^(\w+)(\+?)=(?!\()(.*)$", re.DOTALL)
EXPANDED = re.compile(r"\$\{(\w+)\[[@*]\]")
ARITHMETIC = re.compile(r"\$\(\(([^()$]+(?:\([^()$]*\)[^()$]*)*)\)\)")
RUNTIME = re.compile(r"""env_vars["'\\]+\s*:\s*\{((?:\$\{[^}]*\}|[^}])*)\}""")
PAIR = re.compile(r'"(\w+)"\s*:\s*"(.*?)"(?=\s*[,}\n]|\s*$)')
BEFORE_ASSIGNMENT = ("export", "readonly", "local", "declare", "then", "do", "else", "{")
ENDS = ("|", "||", "&&", ";", "&", ">", "2>&1", ">>")
DEEPEST = 8  # files that source files, defaults in defaults


@dataclass
class _Shell:
    """What a shell would hold while it reads the script."""

    scalars: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    taken: list[bool | None] = field(default_factory=list)  # of each open ``if``, None: only a shell knows
    tests: list[str] = field(default_factory=list)  # the same, as they are written
    guessed: list[str] = field(default_factory=list)

    def value(self, text: str) -> str:
        """Text with the variables that are known put in."""

        def known(match: re.Match[str]) -> str:
            name, default = match[1] or match[2], match[3]
            found = self.scalars.get(name) or os.environ.get(name)
            if not found and KEPT.fullmatch(match[0]):
                self.scalars[name] = default
            return found or (match[0] if default is None else default)

        for _ in range(DEEPEST):
            text = REFERENCE.sub(known, text)
        return ARITHMETIC.sub(self._number, text)

    def _number(self, match: re.Match[str]) -> str:
        text = re.sub(r"[A-Za-z_]\w*", lambda name: self.value(f"${{{name[0]}}}"), match[1])
        if not re.fullmatch(r"[\d\s+*/%()-]+", text):
            return match[0]
        return str(int(eval(text.replace("/", "//"), {"__builtins__": {}})))

    def words(self, words: Sequence[str]) -> Iterator[str]:
        """Words with arrays and variables put in; a variable that holds flags is several words."""
        for word in words:
            if match := EXPANDED.search(word):
                yield from self.arrays.get(match[1], [])
                continue
            found = self.value(word)
            split = found != word and found.startswith("--") and word.startswith("$")
            yield from shlex.split(found) if split else [found]


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
    shell = _Shell()
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
    files: Mapping[str, str], shell: _Shell, commands: Iterator[list[str]], given: Sequence[str]
) -> tuple[str | None, list[str]]:
    """The last launch: its program and words; a script may have one in each branch."""
    launched: tuple[str | None, list[str]] = (None, [])
    array = None
    for words in (clause for line in commands for clause in _clauses(line)):
        if array is None and _skips(shell, words):
            continue
        for word in (word for word in words if KEPT.search(word)):
            shell.value(word)
        array = _assigned(shell, words, array)
        at = next((i for i, word in enumerate(words) if Path(word).name in PROGRAMS), None)
        if array is None and at is not None and not words[0].startswith("pkill"):
            rest = words[at + 1 :]
            stop = next((i for i, word in enumerate(rest) if word in ENDS), len(rest))
            own = [w for word in rest[:stop] for w in (given if word in ("$@", "${@}") else [word])]
            launched = words[at], list(shell.words(own))
        elif array is None and EXPANDED.match(words[0]) and launched[0]:
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


def _assigned(shell: _Shell, words: Sequence[str], array: str | None) -> str | None:
    """Follows what a line assigns; returns the array whose brackets are still open."""
    leading = True
    for word in words:
        match = ARRAY.match(word) if array is None else None
        if match:
            array, begins = match[1], word[match.end() - 1 :].startswith("(")
            if not word[: match.end()].endswith("+=(") and begins:
                shell.arrays[array] = []
            word = word[match.end() :]
        if array is not None:
            closed = word.count(")") > word.count("(")
            inner = word.rstrip(";").removesuffix(")") if closed else word
            shell.arrays.setdefault(array, []).extend(shell.words([inner]) if inner else [])
            shell.guessed += [
                test for test, taken in zip(shell.tests, shell.taken, strict=True) if taken is None
            ]
            array = None if closed else array
        elif leading and (assigned := ASSIGNED.match(word)):
            before = shell.scalars.get(assigned[1], "") if assigned[2] else ""
            shell.scalars[assigned[1]] = before + shell.value(assigned[3].rstrip(";"))
        else:
            leading = leading and word.rstrip(";") in BEFORE_ASSIGNMENT
    return array


def _skips(shell: _Shell, words: Sequence[str]) -> bool:
    """Whether a line lies in a branch that is not taken; follows if, else and fi."""
    first = words[0].rstrip(";") if words else ""
    if first == "if":
        shell.taken.append(_holds(shell, words[1:]))
        shell.tests.append(" ".join(words))
    elif first in ("else", "elif") and shell.taken:
        before = shell.taken[-1]
        shell.taken[-1] = False if before in (True, None) else True
    elif first == "fi" and shell.taken:
        shell.taken.pop(), shell.tests.pop()
    return False in shell.taken


def _holds(shell: _Shell, words: Sequence[str]) -> bool | None:
    """Whether a test such as ``[ -n "$X" ]`` holds, None where only a shell can know."""
    test = [shell.value(word) for word in words]
    for end in ("];", "]];", "]", "]]"):
        if end in test:
            test = test[1 : test.index(end)]
            break
    else:
        test = []
    test = ["" if REFERENCE.fullmatch(word) else word for word in test]
    known: bool | None = None
    if not any("$" in word or "`" in word for word in test):
        if len(test) == 2 and test[0] in ("-z", "-n"):
            known = (test[1] == "") == (test[0] == "-z")
        elif len(test) == 3 and test[1] in ("=", "==", "!=", "-eq", "-ne"):
            known = (test[0] == test[2]) == (test[1] in ("=", "==", "-eq"))
    return known


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
    text = DIRNAME.sub(str(path.resolve().parent), text)
    text = FOLDER.sub(lambda match: str(Path(match[1]).resolve()), text)
    shell, lines = _Shell(), []
    for line in text.splitlines():
        match = SOURCE.match(line)
        if match is None or depth == DEEPEST:
            _assigned(shell, next(commands_of([line]), []), None)
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
