"""``off_policy.jsonl``: one line of strict JSON per optimizer step, each step once."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slime_ext.host.warnings import warn_once

FILE = "off_policy.jsonl"
ANY = "surrogateescape"  # lines that are not ours may hold any bytes


@dataclass
class StepFile:
    """Appends a line per step; a run that goes on first loses the lines of the steps that it trains again."""

    path: Path
    is_open: bool = False
    last: tuple[int, ...] = ()

    def add(self, where: Mapping[str, int], values: Mapping[str, float]) -> None:
        """Writes one line; a number that is not finite is null. A file that cannot be written is said once.

        Args:
            where: what tells the steps apart, in the order in which they count up.
        """
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        row = {**where, "time": round(time.time(), 3), **finite}
        try:
            self._append(where, json.dumps(row, allow_nan=False) + "\n")
        except OSError as error:  # one rank alone stopping would leave the others waiting for it
            self.is_open = False  # what got half into the file is taken out first
            warn_once(
                f"{self.path}: expected a file that can be written, got {error.strerror or error}: training "
                "goes on without its lines"
            )

    def _append(self, where: Mapping[str, int], line: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        place = tuple(where.values())
        if not self.is_open or place <= self.last:  # a host may train a step again that failed
            _cut(self.path, where)
        self.is_open, self.last = True, place
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)


def _cut(path: Path, where: Mapping[str, int]) -> None:
    """Takes out the steps from `where` on, and a last line that a killed run left unfinished."""
    lines = _text(path).splitlines(keepends=True) if path.is_file() else []
    kept = [line for line in lines if line.endswith("\n") and not _is_redone(line, where)]
    if len(kept) < len(lines):
        temporary = path.with_name(path.name + ".tmp")  # a kill in between leaves the first
        temporary.write_text("".join(kept), encoding="utf-8", errors=ANY)
        temporary.replace(path)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors=ANY)


def _is_redone(line: str, where: Mapping[str, int]) -> bool:
    """Whether a line is of this step or a later one; one that is not ours is not."""
    try:
        row = json.loads(line)
        return [row[key] for key in where] >= list(where.values())
    except (ValueError, KeyError, TypeError):
        return False
