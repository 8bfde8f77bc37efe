"""Writes the results of the committed lines into the package's table and into the pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.evidence import pooled, table
from benchmarks.evidence.rows import Row
from benchmarks.evidence.settings import ROOT, Settings
from slime_ext.tools.analysis.evidence import Evidence

BEGIN, END = "<!-- made by python -m benchmarks.evidence table -->\n", "<!-- end -->"
PACKAGE = "slime_ext/tools/analysis/evidence.yaml"
EVIDENCE, RESULTS = "docs/evidence.md", "benchmarks/evidence/RESULTS.md"


def write(of: Settings, rows: Sequence[Row], root: Path = ROOT) -> None:
    """Writes the package's table, and replaces the text between the marks of each page."""
    evidence = pooled.evidence(of, rows)
    (root / PACKAGE).write_text(pooled.text(evidence))
    made = {
        EVIDENCE: pooled.advice(Evidence.model_validate(evidence)),
        RESULTS: f"{pooled.report(of, rows)}\n\n{table.text(of, rows)}",
    }
    for name, text in made.items():
        path = root / name
        before, _, rest = path.read_text().partition(BEGIN)
        path.write_text(f"{before}{BEGIN}\n{text}\n\n{END}{rest.partition(END)[2]}")
