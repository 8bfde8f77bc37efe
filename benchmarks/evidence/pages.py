"""Writes the results of the committed lines into the pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.evidence import pooled, table
from benchmarks.evidence.rows import Row
from benchmarks.evidence.settings import ROOT, Settings

BEGIN, END = "<!-- made by python -m benchmarks.evidence table -->\n", "<!-- end -->"
EVIDENCE, RESULTS = "docs/evidence.md", "benchmarks/evidence/RESULTS.md"


def write(of: Settings, rows: Sequence[Row], root: Path = ROOT) -> None:
    """Replaces the text between the marks of each page."""
    measured = pooled.conditions(of, rows)
    results = pooled.all_results(measured), pooled.report(of, rows), table.text(of, rows)
    made = {EVIDENCE: pooled.summary(measured), RESULTS: "\n\n".join(results)}
    for name, text in made.items():
        path = root / name
        before, _, rest = path.read_text().partition(BEGIN)
        path.write_text(f"{before}{BEGIN}\n{text}\n\n{END}{rest.partition(END)[2]}")
