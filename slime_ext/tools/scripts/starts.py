"""Finds the commands of a script that start train.py, with their words, environment and folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from slime_ext.tools.scripts.trace import PROGRAMS, TOKEN, Call, Line, Run, program_of

# Matches a traced command that names train.py and is not a builtin of bash.
LAUNCH = re.compile(
    r"(?!(?:echo|printf|'?\[|test|eval|source|\.|export|local|declare)\s|\w+\+?=)[^\n]*\b"
    rf"(?:{'|'.join(map(re.escape, PROGRAMS))})"
)
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


def started(run: Run) -> list[Started]:
    """Returns the launches of a run in their order."""
    calls = [(call, at) for call in run.calls if (at := program_of(call.words)) is not None]
    lines = [line for line in run.lines if LAUNCH.match(line.text)] if len(calls) > 1 else []
    places = lines if len(lines) == len(calls) else [None] * len(calls)
    return [
        Started(call.words[at], call.words[at + 1 :], _environment(call), call.folder, line, call.files)
        for (call, at), line in zip(calls, places, strict=True)
    ]


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
        elif word == "--runtime-env-json" and i + 1 < len(call.words):
            variables |= runtime_variables(call.words[i + 1])
        elif word.startswith("--runtime-env-json="):
            variables |= runtime_variables(word.partition("=")[2])
    return variables


def runtime_variables(text: str) -> dict[str, str]:
    """Returns ``env_vars`` of a Ray job's environment."""
    try:
        variables = json.loads(text, strict=False).get("env_vars", {})
    except (ValueError, AttributeError):
        return {}
    return {str(name): str(value) for name, value in variables.items()}
