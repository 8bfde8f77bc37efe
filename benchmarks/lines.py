"""Keeps one line of JSON for each finished run in a file. A run with a line is not started again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path


def read(file: Path, key: str) -> dict[str, dict]:
    """Returns the lines by their value of `key`; {} if the file does not exist."""
    rows = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return {row[key]: row for row in rows}


def complete(file: Path, key: str, runs: Mapping[str, Callable[[], dict]]) -> None:
    """Executes the runs that have no line yet, one after the other. Adds each line when its run has ended."""
    done = read(file, key)
    file.parent.mkdir(parents=True, exist_ok=True)
    for name in (name for name in runs if name not in done):
        line = json.dumps(runs[name]())
        with file.open("a") as lines:
            lines.write(line + "\n")
        print(line, flush=True)
