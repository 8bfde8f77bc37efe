"""Which of a script's commands start train.py, and with what words, environment and folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from slime_ext.tools.scripts.trace import PROGRAMS, TOKEN, Call, Line, Run, program_of

# A traced command that is none of bash's own and names train.py.
LAUNCH = re.compile(
    r"(?!(?:echo|printf|'?\[|test|eval|source|\.|export|local|declare)\s|\w+\+?=)[^\n]*\b"
    rf"(?:{'|'.join(map(re.escape, PROGRAMS))})"
)
NOT_GIVEN = ("PATH", "HOSTNAME")  # of the sandbox


@dataclass(frozen=True)
class Started:
    """A command by which the script starts train.py.

    Args:
        program: train.py as it is named there.
        words: behind the program.
        environment: variables that its command sets, among them those of ``--runtime-env-json``.
        folder: where it is run.
        line: of the trace; None where it cannot be told which.
        files: name -> text, of files that its words name and the script itself wrote.
    """

    program: str
    words: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str
    line: Line | None
    files: Mapping[str, str]


def started(run: Run) -> list[Started]:
    """The launches of a run, in their order."""
    calls = [(call, at) for call in run.calls if (at := program_of(call.words)) is not None]
    lines = [line for line in run.lines if LAUNCH.match(line.text)] if len(calls) > 1 else []
    places = lines if len(lines) == len(calls) else [None] * len(calls)
    return [
        Started(call.words[at], call.words[at + 1 :], _environment(call), call.folder, line, call.files)
        for (call, at), line in zip(calls, places, strict=True)
    ]


def _environment(call: Call) -> dict[str, str]:
    found = {
        name: text
        for name, text in call.environment.items()
        if name not in NOT_GIVEN and not TOKEN.fullmatch(text)
    }
    if "ray" in call.words:
        found = {}  # a job of Ray has an environment of its own
    for i, word in enumerate(call.words):
        if (match := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word, re.DOTALL)) and "env" in call.words[:i]:
            found[match[1]] = match[2]
        elif word == "--runtime-env-json" and i + 1 < len(call.words):
            found |= runtime_variables(call.words[i + 1])
        elif word.startswith("--runtime-env-json="):
            found |= runtime_variables(word.partition("=")[2])
    return found


def runtime_variables(text: str) -> dict[str, str]:
    """``env_vars`` of a Ray job's environment."""
    try:
        found = json.loads(text, strict=False).get("env_vars", {})
    except (ValueError, AttributeError):
        return {}
    return {str(name): str(said) for name, said in found.items()}
