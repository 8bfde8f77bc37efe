"""A host's log: opened for one run, and read for what ended it."""

from __future__ import annotations

import contextlib
import fcntl
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from slime_ext.errors import ConfigError
from slime_ext.tools.without_cuda import machine

# Of a line of a log: what Ray puts before it, and an exception.
PREFIX = re.compile(r"^\((?:\w+ )?pid=\d+[^)]*\)\s?")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
RAISED = re.compile(r"^(?:[a-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Exit|Interrupt))(?::\s*(.*))?$")
OF_RAY = ("RayTaskError", "ActorDiedError", "ActorUnavailableError", "RayActorError", "WorkerCrashedError")
REFUSED = re.compile(r"^\S+\.py: error: (.*)$")  # argparse
FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)')
LONGEST = 300  # characters of a message
BY_WHOM = ", by hand or by a machine without memory"
NO_ROOM = "No space left on device"


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[str]]:
    """An empty log, held until every process that has it open has ended.

    Raises:
        ConfigError: another run writes to it.
    """
    with path.open("a") as log:
        _hold(log, path)
        log.truncate(0)
        yield log


def check_unused(path: Path) -> None:
    """Raises ConfigError where a process of another run has the log open."""
    if path.is_file():
        with path.open("a") as log:
            _hold(log, path)


def _hold(log: IO[str], path: Path) -> None:
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{path.parent}: expected a folder of no other run, got one that a run writes to: name another "
            "with --out, or end that run"
        ) from None


def ending(status: int, path: Path) -> str:
    """What ended a run, in one line: a signal, a full disk, or the last exception of its log.

    Args:
        status: of `run_host`; -n where signal n ended the host.
    """
    if status < 0:
        name = signal.Signals(-status).name
        return f"the host was killed by {name}{BY_WHOM if -status == signal.SIGKILL else ''}"
    lines = plain_lines(path.read_text(errors="replace") if path.exists() else "")
    said = next((line.strip() for line in reversed(lines) if NO_ROOM in line), "")
    full = machine.full_places(path.parent)
    if said or full:
        where = " and ".join(map(str, full)) or f"{path.parent}, {machine.TEMPORARY} or {machine.SHARED}"
        return f"no room left in {where}{f': {said[:LONGEST]}' if said else ''}"
    return cause_of("\n".join(lines))


def plain_lines(log: str) -> list[str]:
    """The lines of a log without colours and what Ray puts before them."""
    return [COLOUR.sub("", PREFIX.sub("", line)) for line in log.splitlines()]


def cause_of(log: str) -> str:
    """The last exception in a log as ``Type: message (file:line)``, or its last line.

    >>> cause_of('Traceback (most recent call last):\\n  File "a.py", line 3, in f\\nValueError: no\\n')
    'ValueError: no (a.py:3)'
    """
    lines = plain_lines(log)
    if killed := _killed_actor(lines):
        return killed
    found = _last(lines, own=True) or _last(lines, own=False)
    if found is None:
        return next((line.strip() for line in reversed(lines) if line.strip()), "the log is empty")[:LONGEST]
    at, text = found
    frames = (FRAME.match(line) for line in reversed(lines[max(0, at - 60) : at]))
    frame = next(filter(None, frames), None)
    return f"{text[:LONGEST]}{f' ({frame[1]}:{frame[2]})' if frame else ''}"


def _killed_actor(lines: Sequence[str]) -> str | None:
    """What the last exception says of an actor of Ray that a signal ended; none of Python's ended it."""
    at = next((at for at in range(len(lines) - 1, -1, -1) if RAISED.match(lines[at])), None)
    if at is None or "died unexpectedly" not in lines[at]:
        return None
    name = next((line.split()[-1] for line in lines[at : at + 4] if "class_name:" in line), "an actor of Ray")
    return f"{name} of the host was killed{BY_WHOM}"


def _last(lines: Sequence[str], *, own: bool) -> tuple[int, str] | None:
    """Line number and text of the last exception; of Ray's only where ``own`` is false."""
    for at in range(len(lines) - 1, -1, -1):
        if match := REFUSED.match(lines[at]):
            return at, match[1]
        if (match := RAISED.match(lines[at])) and (match[1] not in OF_RAY or not own):
            message = match[2] or next((line.strip() for line in lines[at + 1 :] if line.strip()), "")
            return at, f"{match[1]}: {message}" if message else match[1]
    return None
