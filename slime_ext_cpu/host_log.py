"""Opens a host's log for one run, and finds in it what ended the run."""

from __future__ import annotations

import contextlib
import fcntl
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from slime_ext.errors import ConfigError
from slime_ext_cpu import machine

# What Ray puts before a line of a log.
PREFIX = re.compile(r"^\((?:\w+ )?pid=\d+[^)]*\)\s?")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
RAISED = re.compile(r"^(?:[a-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Exit|Interrupt))(?::\s*(.*))?$")
OF_RAY = ("RayTaskError", "ActorDiedError", "ActorUnavailableError", "RayActorError", "WorkerCrashedError")
REFUSED = re.compile(r"^\S+\.py: error: (.*)$")  # argparse prints it
CRASHED = re.compile(r"Subprocess (\w+) \(pid=\d+\) crashed with exit code (-?\d+)")  # SGLang prints it
NO_ANSWER = ("ConnectionError", "ConnectError", "ClientConnectorError")
FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)')
LONGEST = 300  # characters of a message
BY_WHOM = ", by a user or because memory ran out"
NO_ROOM = "No space left on device"


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[str]]:
    """Opens an empty log and locks it until every process that uses it has ended.

    Raises:
        ConfigError: another run writes to the log.
    """
    with path.open("a") as log:
        _hold(log, path)
        log.truncate(0)
        yield log


def check_unused(path: Path) -> None:
    """Raises ConfigError if a process of another run has the log open."""
    if path.is_file():
        with path.open("a") as log:
            _hold(log, path)


def _hold(log: IO[str], path: Path) -> None:
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{path.parent}: expected a folder that no other run uses, got a folder that a run writes to: "
            "name another folder with --out, or end that run"
        ) from None


def ending(status: int, path: Path) -> str:
    """Says what ended a run: a signal, a full disk, or the log's last exception.

    Args:
        status: what `HostRun.run` returned; -n if signal n ended the host.
    """
    if status < 0:
        return f"the host {_how(status)}"
    lines = plain_lines(path)
    message = next((line.strip() for line in reversed(lines) if NO_ROOM in line), "")
    full = machine.full_places(path.parent)
    if message or full:
        where = " and ".join(map(str, full)) or f"{path.parent}, {machine.TEMPORARY} or {machine.SHARED}"
        return f"no room left in {where}{f': {message[:LONGEST]}' if message else ''}"
    return cause_of(lines)


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}{BY_WHOM if -status == signal.SIGKILL else ''}"


def plain_lines(log: Path) -> list[str]:
    """Returns the lines of a log without colours and Ray's prefixes. Without a file, returns []."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return [COLOUR.sub("", PREFIX.sub("", line)) for line in text.splitlines()]


def cause_of(lines: Sequence[str]) -> str:
    """Returns a log's last exception as ``Type: message (file:line)``, or its last line.

    >>> cause_of(["Traceback (most recent call last):", '  File "a.py", line 3, in f', "ValueError: no"])
    'ValueError: no (a.py:3)'
    """
    exceptions = list(_exceptions(lines))
    if not exceptions:
        return next((line.strip() for line in reversed(lines) if line.strip()), "the log is empty")[:LONGEST]
    at, _, text = exceptions[-1]
    if crash := next(filter(None, map(CRASHED.search, lines[:at])), None):
        return f"the engine's process {crash[1]} (SGLang) {_how(int(crash[2]))}"
    if "died unexpectedly" in text:
        actor = next((line.split()[-1] for line in lines[at : at + 4] if "class_name:" in line), "an actor")
        return f"the host's {actor} was killed{BY_WHOM}"
    at, kind, text = next((f for f in reversed(exceptions) if f[1] not in OF_RAY), exceptions[-1])
    if kind in NO_ANSWER:
        return f"the engine does not answer; perhaps it was killed{BY_WHOM}: {text[:LONGEST]}"
    frames = (FRAME.match(line) for line in reversed(lines[max(0, at - 60) : at]))
    frame = next(filter(None, frames), None)
    return f"{text[:LONGEST]}{f' ({frame[1]}:{frame[2]})' if frame else ''}"


def _exceptions(lines: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Yields line number, type and text of each exception and each error of argparse."""
    for at, line in enumerate(lines):
        if match := REFUSED.match(line):
            yield at, "", match[1]
        elif match := RAISED.match(line):
            message = _message(lines, at, match[2])
            yield at, match[1], f"{match[1]}: {message}" if message else match[1]


def _message(lines: Sequence[str], at: int, behind: str | None) -> str:
    """Returns an exception's message. This is the text after its colon, the next line, or the assertion."""
    if behind is None:
        above = (line.strip() for line in reversed(lines[max(0, at - 3) : at]))
        return next((line for line in above if line.startswith("assert ")), "")
    return behind or next((line.strip() for line in lines[at + 1 :] if line.strip()), "")
