"""``off_policy.jsonl``: one line of strict JSON per optimizer step, each step once."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FILE = "off_policy.jsonl"


@dataclass
class StepFile:
    """Appends a line per step; a run that goes on first loses the lines of the steps that it trains again."""

    path: Path
    is_open: bool = False

    def add(self, where: Mapping[str, int], values: Mapping[str, float]) -> None:
        """Writes one line; a number that is not finite is null.

        Args:
            where: what tells the steps apart, in the order in which they count up.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.is_open:
            _cut(self.path, where)
            self.is_open = True
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        row = {**where, "time": round(time.time(), 3), **finite}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")


def _cut(path: Path, where: Mapping[str, int]) -> None:
    """Takes out the steps from `where` on, and a last line that a killed run left unfinished."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    kept = [line for line in lines if line.endswith("\n") and not _is_redone(line, where)]
    if len(kept) < len(lines):
        temporary = path.with_name(path.name + ".tmp")  # a kill in between leaves the first
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(path)


def _is_redone(line: str, where: Mapping[str, int]) -> bool:
    """Whether a line is of this step or a later one; one that is not ours is not."""
    try:
        row = json.loads(line)
        return [row[key] for key in where] >= list(where.values())
    except (ValueError, KeyError, TypeError):
        return False
