"""Why a run ended, out of its log: the exception itself, without the frames of Ray around it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

PREFIX = re.compile(r"^\((?:\w+ )?pid=\d+[^)]*\)\s?")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
RAISED = re.compile(r"^(?:[a-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Exit|Interrupt))(?::\s*(.*))?$")
OF_RAY = ("RayTaskError", "ActorDiedError", "ActorUnavailableError", "RayActorError", "WorkerCrashedError")
REFUSED = re.compile(r"^\S+\.py: error: (.*)$")  # argparse
FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)')
LONGEST = 300  # characters of a message


def cause(log: str) -> str:
    """The last exception in a log as ``Type: message (file:line)``, or its last line.

    >>> cause('Traceback (most recent call last):\\n  File "a.py", line 3, in f\\nValueError: no\\n')
    'ValueError: no (a.py:3)'
    """
    lines = [COLOUR.sub("", PREFIX.sub("", line)) for line in log.splitlines()]
    found = _last(lines, own=True) or _last(lines, own=False)
    if found is None:
        return next((line.strip() for line in reversed(lines) if line.strip()), "the log is empty")[:LONGEST]
    at, text = found
    frames = (FRAME.match(line) for line in reversed(lines[max(0, at - 60) : at]))
    frame = next(filter(None, frames), None)
    return f"{text[:LONGEST]}{f' ({frame[1]}:{frame[2]})' if frame else ''}"


def _last(lines: Sequence[str], *, own: bool) -> tuple[int, str] | None:
    """Line number and text of the last exception; of Ray's only where ``own`` is false."""
    for at in range(len(lines) - 1, -1, -1):
        if match := REFUSED.match(lines[at]):
            return at, match[1]
        if (match := RAISED.match(lines[at])) and (match[1] not in OF_RAY or not own):
            message = match[2] or _first(lines[at + 1 :])
            return at, f"{match[1]}: {message}" if message else match[1]
    return None


def _first(lines: Iterable[str]) -> str:
    return next((line.strip() for line in lines if line.strip()), "")
