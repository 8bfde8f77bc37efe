"""Says in one line what an engineer should do next."""

from __future__ import annotations

from collections.abc import Sequence

from slime_ext.tools.analysis.document import Finding, Looked

UNKNOWN = "unexplained"


def headline(findings: Sequence[Finding], detectors: Sequence[Looked]) -> str:
    """Returns what to do about the most severe finding, or how many checks found no fault."""
    faults = [finding for finding in findings if finding.is_fault]
    if not faults:
        could = sum(row.state in ("found", "nothing") for row in detectors)
        return f"No fault found: {could} of {len(detectors)} checks ran." if detectors else "No fault found."
    first = faults[0]
    more = f" ({len(faults) - 1} more below)" if len(faults) > 1 else ""
    begin = {"error": "Fix first", "warning": "Look at"}[first.severity]
    if first.or_else or first.says == "symptom":
        begin = "Find out"
    if first.name == UNKNOWN:
        begin = "Find the cause"
    return f"{begin}: {first.title}{more}"
