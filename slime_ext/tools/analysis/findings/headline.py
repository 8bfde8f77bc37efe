"""What a tired engineer should do next, in one line."""

from __future__ import annotations

from collections.abc import Sequence

from slime_ext.tools.analysis.document import Finding, Looked

UNKNOWN = "unexplained"


def headline(findings: Sequence[Finding], detectors: Sequence[Looked]) -> str:
    """The gravest finding and the first step against it; that nothing was found, and of how many checks."""
    faults = [finding for finding in findings if finding.is_fault]
    if not faults:
        could = sum(row.state in ("found", "nothing") for row in detectors)
        return f"No fault found: {could} of {len(detectors)} checks ran." if detectors else "No fault found."
    first = faults[0]
    if first.name == UNKNOWN:
        return f"{first.title} {_first_sentence(first.fix)}"
    more = f" ({len(faults) - 1} more below)" if len(faults) > 1 else ""
    begin = {"error": "Fix first", "warning": "Look at"}[first.severity]
    if first.or_else or first.says == "symptom":
        begin = "Find out"
    return f"{begin}: {first.title}{more}"


def _first_sentence(text: str) -> str:
    return f"{text.split('. ')[0].rstrip('.')}."
