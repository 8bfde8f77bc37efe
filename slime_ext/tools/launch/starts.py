"""Finds the commands of a script that start train.py, with their words, environment and folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from slime_ext.tools.launch.trace import PROGRAMS, TOKEN, Call, Line, Run, at, narrowed, program_of

# A traced command that names train.py and is not a builtin of bash: ray job submit -- python3 train.py
LAUNCH = re.compile(
    r"(?!(?:echo|printf|'?\[|test|eval|source|\.|export|local|declare)\s|\w+\+?=)[^\n]*\b"
    rf"(?:{'|'.join(map(re.escape, PROGRAMS))})"
)
FOLDERS = ("--working-dir", "--chdir")  # options of Ray and Slurm that name the program's folder
ENVIRONMENT = "--runtime-env-json"  # the option of Ray that has the folder and the variables
VARIABLES = ("--export", "-e", "--env")  # options of Slurm and containers: --export=ALL,X=1, -e X=1
ELSEWHERE = ("ssh", "docker", "podman", "kubectl", "ray")  # programs whose shell inherits no variable
OF_SANDBOX = ("PATH", "HOSTNAME")  # the sandbox sets these variables, not the script


@dataclass(frozen=True)
class Started:
    """A command by which the script starts train.py.

    Args:
        program: train.py as the command names it.
        words: the words after the program.
        environment: the variables that the command sets, including those of ``--runtime-env-json``.
        folder: the working directory of the command.
        line: the line of the trace; None if it is not clear which line it is.
        files: name -> text of the files that its words name and that the script wrote.
    """

    program: str
    words: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str
    line: Line | None
    files: Mapping[str, str]

    @property
    def narrow(self) -> Started:
        """The same launch with tokens of the usual length."""
        environment = {name: narrowed(text) for name, text in self.environment.items()}
        return replace(self, words=tuple(map(narrowed, self.words)), environment=environment)

    def is_same(self, other: Started) -> bool:
        """Whether another launch differs at most in its place in the script."""
        return replace(self, line=other.line) == other


def started(run: Run) -> list[Started]:
    """Returns the launches of a run in their order."""
    calls = [(call, at) for call in run.calls if (at := program_of(call.words)) is not None]
    lines = [line for line in run.lines if LAUNCH.match(line.text)] if len(calls) > 1 else []
    places = _places([call.words for call, _ in calls], lines)
    return [
        Started(call.words[at], call.words[at + 1 :], _environment(call), call.folder, line, call.files)
        for (call, at), line in zip(calls, places, strict=True)
    ]


def _places(commands: Sequence[tuple[str, ...]], lines: Sequence[Line]) -> list[Line | None]:
    """Returns the line of each command, which can begin with other words: nohup python3 train.py.

    Commands and lines come in the same order. A text for another shell is traced before the other lines.
    """
    places: list[Line | None] = []
    begin = 0
    for words in commands:
        ends = (i for i in range(begin, len(lines)) if lines[i].words[-len(words) :] == [*words])
        place = next(ends, None)
        places.append(None if place is None else lines[place])
        begin = begin if place is None else place + 1
    return places


def _environment(call: Call) -> dict[str, str]:
    variables = {
        name: text
        for name, text in call.environment.items()
        if name not in OF_SANDBOX and not TOKEN.fullmatch(text)
    }
    if "ray" in call.words:
        variables = {}  # because a Ray job does not inherit the environment of its submitter
    for i, word in enumerate(call.words):
        if (match := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word, re.DOTALL)) and "env" in call.words[:i]:
            variables[match[1]] = match[2]
        elif word == ENVIRONMENT and i + 1 < len(call.words):
            variables |= runtime_variables(call.words[i + 1])
        elif word.startswith(f"{ENVIRONMENT}="):
            variables |= runtime_variables(word.partition("=")[2])
    return variables


def folder_of(words: Sequence[str], folder: str, token: Callable[[str], str]) -> str:
    """Returns the folder in which a command's program runs.

    Args:
        folder: the folder in which the command starts.
        token: maps an address on the network to the token for the folder that it becomes.
    """
    for word, after in pairwise([*words[: program_of(words)], ""]):
        name, has_value, value = word.partition("=")
        value = value if has_value else after
        if name == ENVIRONMENT:
            value = str(_runtime(value).get("working_dir", ""))
        if name in (*FOLDERS, ENVIRONMENT) and value:
            folder = at(folder, token(value) if "://" in value else value)
    return folder


def inherited(
    words: Sequence[str], environment: Mapping[str, str], elsewhere: Mapping[str, str]
) -> dict[str, str]:
    """Returns the variables of a shell that a command starts.

    Args:
        environment: the variables of the command. A shell in a container or on another machine gets only
            those that the command's options name.
        elsewhere: the variables that a script gets there.
    """
    is_elsewhere = any(Path(word).name in ELSEWHERE for word in words[:2])  # sudo docker run
    variables = dict(elsewhere if is_elsewhere or "--export=NONE" in words else environment)
    for word, after in pairwise([*words, ""]):
        option, has_value, value = word.partition("=")
        value = value if has_value else after
        if option == ENVIRONMENT:
            variables |= runtime_variables(value)
        elif option in VARIABLES:
            pairs = (each.partition("=") for each in value.split("," if option == "--export" else "\n"))
            variables |= {name: text for name, is_set, text in pairs if is_set}
    return variables


def runtime_variables(text: str) -> dict[str, str]:
    """Returns ``env_vars`` of a Ray job's environment."""
    variables = _runtime(text).get("env_vars", {})
    return {str(n): str(v) for n, v in variables.items()} if isinstance(variables, dict) else {}


def _runtime(text: str) -> dict[str, Any]:
    """Returns a Ray job's environment. It is empty if the text is none."""
    try:
        environment = json.loads(text, strict=False)
    except ValueError:
        return {}
    return environment if isinstance(environment, dict) else {}
