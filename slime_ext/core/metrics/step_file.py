"""Writes and reads a file of JSON lines, one line per step of a run."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from slime_ext.replacing import replacing

BLOCK = 1 << 20  # bytes per read, from the end of the file
Values = Mapping[str, float]


@dataclass
class StepFile:
    """Appends a line of strict JSON per step.

    If a run resumes, or a host repeats a step, the lines of that step and of later steps are first removed,
    and so is an unfinished last line. Lines that belong to no step stay. If the process is killed meanwhile,
    the file is either unchanged or has all of these lines removed.
    """

    path: Path
    last: tuple[int, ...] = ()  # the step of the last line; empty if it is not known

    def add(self, step: Mapping[str, int], values: Values) -> None:
        """Writes the line of a step: its numbers, the ``time``, and the values.

        The time is in seconds since 1970.

        Args:
            step: the numbers that identify a step, in the order in which they count up.
            values: a number that is not finite becomes null. A ``time`` among them replaces the clock's.

        Raises:
            OSError: the file cannot be written. The next call removes the part of the line that was written.
        """
        line = {**step, "time": round(time.time(), 3), **finite(values)}
        number = tuple(step.values())
        is_next = bool(self.last) and number > self.last
        self.last = ()  # not known until the whole line is in the file
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not is_next:
            self._cut(step)
        append(self.path, line)
        self.last = number

    def _cut(self, step: Mapping[str, int]) -> None:
        with _opened(self.path) as file:
            start, foreign = _repeated(file, step)
            if not foreign:  # truncate is atomic, needs no space, and keeps the file's link, mode and owner
                file.truncate(start)
                return
            with replacing(self.path) as copy:
                file.seek(0)
                shutil.copyfileobj(file, copy)
                copy.truncate(start)
                copy.seek(start)
                copy.writelines(line + b"\n" for line in foreign)


def append(path: Path, values: Mapping[str, Any]) -> None:
    """Appends a line of strict JSON to a file.

    It is one write if the disk has room. If the file ends in an unfinished line, a newline is written first,
    so that only the unfinished line is lost.

    Raises:
        OSError: the file cannot be written; it may hold a part of the line.
        ValueError: a number is not finite.
    """
    data = json.dumps(values, allow_nan=False).encode() + b"\n"
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            data = b"\n" + data
        while data:
            data = data[file.write(data) :]  # a disk that fills up accepts a part, then raises


def finite(values: Values) -> dict[str, float | None]:
    """Replaces NaN and infinities with None, because strict JSON cannot hold them.

    >>> finite({"a": 1.5, "b": float("nan")})
    {'a': 1.5, 'b': None}
    """
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def rows(path: Path, key: str) -> Iterator[dict[str, Any]]:
    """Yields the lines that are JSON objects with a whole number under ``key``."""
    with path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:  # an unfinished line
                continue
            if isinstance(row, dict) and isinstance(row.get(key), int):
                yield row


def _opened(path: Path) -> FileIO:
    """Opens a file for reading and appending, and creates it if it is missing.

    Raises:
        OSError: it is not a regular file. Writing to a pipe could wait for a reader forever.
    """
    file = FileIO(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666), "ab+")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "a pipe or a device", str(path))
    return file


def _repeated(file: FileIO, step: Mapping[str, int]) -> tuple[int, list[bytes]]:
    """Finds where to cut the file, and the later lines that belong to no step.

    It reads the file from its end, back to the last line of an earlier step.
    """
    lines = _lines_from_end(file)
    start, _ = next(lines)  # the unfinished line of a killed run, maybe empty
    foreign: list[bytes] = []
    after_start = 0
    for offset, line in lines:
        is_repeated = _is_repeated(line, step)
        if is_repeated:
            start, after_start = offset, len(foreign)
        elif is_repeated is None:
            foreign.append(line)
        else:
            break
    return start, foreign[:after_start][::-1]


def _lines_from_end(file: FileIO) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, line) from the end of the file.

    The text after the last newline comes first. It may be empty.
    """
    end, beginning = os.fstat(file.fileno()).st_size, b""
    while end:
        size = min(BLOCK, end)
        end -= size
        beginning, *lines = (os.pread(file.fileno(), size, end) + beginning).split(b"\n")
        offset = end + len(beginning) + sum(len(line) + 1 for line in lines)
        for line in reversed(lines):
            offset -= len(line)
            yield offset, line
            offset -= 1
    yield 0, beginning


def _is_repeated(line: bytes, step: Mapping[str, int]) -> bool | None:
    """Tells whether a line is of this step or a later one. Returns None if it is of no step."""
    try:
        row = json.loads(line)
        return bool([row[key] for key in step] >= list(step.values()))
    except (ValueError, KeyError, TypeError):
        return None
