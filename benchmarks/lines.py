"""A line of JSON for each run that has ended, in a file: a run with a line is not started again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path


def read(file: Path, key: str) -> dict[str, dict]:
    """Lines by what they have under `key`; none where there is no file yet."""
    rows = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return {row[key]: row for row in rows}


def complete(file: Path, key: str, runs: Mapping[str, Callable[[], dict]]) -> None:
    """Runs what has no line yet, one after the other; each adds its line when it has ended."""
    done = read(file, key)
    file.parent.mkdir(parents=True, exist_ok=True)
    for name in (name for name in runs if name not in done):
        line = json.dumps(runs[name]())
        with file.open("a") as lines:
            lines.write(line + "\n")
        print(line, flush=True)
