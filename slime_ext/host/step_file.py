"""Writes and reads JSON lines, one per step of a run, each step once."""

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

BLOCK = 1 << 20  # bytes that are read at once, from the end
Values = Mapping[str, float]


@dataclass
class StepFile:
    """Appends a line of strict JSON per step.

    A run that resumes, and a host that repeats a step, first cut the file: the lines of that step and of
    later ones go, and so does an unfinished last line. Lines that are not of steps stay. A process that is
    killed during the cut leaves the file as it was, or cut.
    """

    path: Path
    last: tuple[int, ...] = ()  # the step of the last line; none: what the file ends with is not known

    def add(self, step: Mapping[str, int], values: Values) -> None:
        """Writes the line of a step: its numbers, ``time`` in seconds since 1970, and the values.

        Args:
            step: the numbers that identify a step, in the order in which they count up.
            values: a number that is not finite becomes null; a ``time`` among them counts over the clock's.

        Raises:
            OSError: the file cannot be written. The next call takes out what this one left of its line.
        """
        line = {**step, "time": round(time.time(), 3), **finite(values)}
        number = tuple(step.values())
        is_next = bool(self.last) and number > self.last
        self.last = ()  # until the whole line is in the file
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not is_next:
            self._cut(step)
        append(self.path, line)
        self.last = number

    def _cut(self, step: Mapping[str, int]) -> None:
        with _opened(self.path) as file:
            start, foreign = _repeated(file, step)
            if not foreign:  # atomic; needs no room; link, mode and owner of the file stay
                file.truncate(start)
                return
            with replacing(self.path) as copy:
                file.seek(0)
                shutil.copyfileobj(file, copy)
                copy.truncate(start)
                copy.seek(start)
                copy.writelines(line + b"\n" for line in foreign)


def append(path: Path, values: Mapping[str, Any]) -> None:
    """Appends a line of strict JSON to a file, in one write where the disk has room for it.

    If the file ends in an unfinished line, a newline comes first, so that only that line is lost.

    Raises:
        OSError: the file cannot be written; a part of the line may be in it.
        ValueError: a number is not finite.
    """
    data = json.dumps(values, allow_nan=False).encode() + b"\n"
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            data = b"\n" + data
        while data:
            data = data[file.write(data) :]  # a disk that fills up takes a part, and then raises


def finite(values: Values) -> dict[str, float | None]:
    """The values with None for NaN and infinities, for which JSON has no word.

    >>> finite({"a": 1.5, "b": float("nan")})
    {'a': 1.5, 'b': None}
    """
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def rows(path: Path, key: str) -> Iterator[dict[str, Any]]:
    """The lines that are JSON objects with a whole number under ``key``; others are passed over."""
    with path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:  # unfinished
                continue
            if isinstance(row, dict) and isinstance(row.get(key), int):
                yield row


def _opened(path: Path) -> FileIO:
    """Opens a file to read it and to append to it, and makes it if it is not there.

    Raises:
        OSError: it is not a regular file. The writer of a pipe may have to wait for a reader for ever.
    """
    file = FileIO(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666), "ab+")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "a pipe or a device", str(path))
    return file


def _repeated(file: FileIO, step: Mapping[str, int]) -> tuple[int, list[bytes]]:
    """Where the lines begin that are to be cut, and the foreign lines after that place, which stay.

    The file is read from its end, up to the last line of an earlier step.
    """
    lines = _lines_from_end(file)
    start, _ = next(lines)  # of what a killed run left unfinished
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
    """(offset, line without its newline) from the end: first what follows the last newline, maybe nothing."""
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
    """Whether a line is of this step or a later one; None if it is not of a step."""
    try:
        row = json.loads(line)
        return bool([row[key] for key in step] >= list(step.values()))
    except (ValueError, KeyError, TypeError):
        return None
