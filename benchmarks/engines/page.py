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
HEAD = "setting", "engine", "in the recorded value", "renormalised", "a ratio shows it", "`analyze` finds"


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
    """Returns a row of Markdown per setting and engine."""
    lines = [HEAD, ("---",) * len(HEAD)]
    for name, setting in SETTINGS.items():
        of_setting = [(e, known.rows[name]) for e, known in recorded.items() if name in known.rows]
        for number, (engine, row) in enumerate(of_setting):
            lines.append(
                (
                    "" if number else setting.text,
                    engine,
                    _yes(row.in_value),
                    _yes(row.is_renormalised),
                    f"yes, {row.ratio:g} nats" if row.ratio else "no",
                    ", ".join(f"`{finding}`" for finding in row.findings) or "nothing",
                )
            )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def versions(recorded: Mapping[str, Recorded]) -> str:
    """Returns a line of Markdown per engine with its version and the day of the run."""
    return "\n".join(f"- {name}: {known.version}, run on {known.date}" for name, known in recorded.items())


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"
