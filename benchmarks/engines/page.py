"""Reads and writes expected.yaml, and makes the table of docs/engines.md from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.engines.rows import Row
from benchmarks.engines.settings import SETTINGS

EXPECTED = Path(__file__).with_name("expected.yaml")


@dataclass(frozen=True)
class Engine:
    """An engine as it ran: its name in the table, its version, and the day."""

    name: str
    version: str
    date: str


@dataclass(frozen=True)
class Recorded:
    """What is recorded of an engine."""

    version: str
    date: str
    rows: Mapping[str, Row]


def read() -> dict[str, Recorded]:
    """Returns what is recorded, by the engine's name."""
    content: dict[str, Any] = yaml.safe_load(EXPECTED.read_text()) if EXPECTED.exists() else {}
    return {
        name: Recorded(
            engine["version"],
            engine["date"],
            {
                setting: Row(**row | {"findings": tuple(row["findings"])})
                for setting, row in engine["rows"].items()
            },
        )
        for name, engine in content.items()
    }


def record(engine: Engine, rows: Mapping[str, Row]) -> None:
    """Replaces what is recorded of an engine."""
    everything = read() | {engine.name: Recorded(engine.version, engine.date, rows)}
    content = {
        name: {
            "version": recorded.version,
            "date": recorded.date,
            "rows": {n: asdict(row) | {"findings": list(row.findings)} for n, row in recorded.rows.items()},
        }
        for name, recorded in everything.items()
    }
    text = yaml.safe_dump(content, sort_keys=False, width=110)
    EXPECTED.write_text(f"# Written by `python -m benchmarks.engines ENGINE --record`.\n{text}")


def table(recorded: Mapping[str, Recorded]) -> str:
    """Returns a row of Markdown per setting, with a column per engine."""
    lines = [("setting", *recorded), ("---",) * (1 + len(recorded))]
    for name, setting in SETTINGS.items():
        rows = [known.rows.get(name) for known in recorded.values()]
        if any(rows):
            lines.append((setting.text, *(_cell(row) if row else "not run" for row in rows)))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def versions(recorded: Mapping[str, Recorded]) -> str:
    """Returns a line of Markdown per engine with its version and the day of the run."""
    return "\n".join(f"- {name}: {known.version}, run on {known.date}" for name, known in recorded.items())


def _cell(row: Row) -> str:
    """Returns what is true of a row, in the words that docs/engines.md explains."""
    words = [
        *(["recorded"] if row.in_value else []),
        *(["renormalised"] if row.is_renormalised else []),
        *([f"{row.ratio:g} nats"] if row.ratio else []),
        *(f"`{finding}`" for finding in row.findings),
        *(["ends early"] if row.ends else []),
    ]
    return ", ".join(words) or "-"
