"""Says in one line what an engineer should do next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from slime_ext.tools.analysis.document import Finding, Looked

UNKNOWN = "unexplained"


def checks(detectors: Sequence[Looked]) -> str:
    """Says how many checks ran, and why the others said nothing. All are accounted for."""
    states = Counter(row.state for row in detectors)
    ran = states["found"] + states["nothing"]
    others = [
        (states["left to another"], "left to a finding that looks like them"),
        (states["excluded"], "excluded by the mean ratio"),
        (states["could not look"], "skipped because the dump lacks what they need"),
    ]
    rest = "".join(f", {count} {why}" for count, why in others if count)
    return f"{ran} of {len(detectors)} checks ran{rest}"


def headline(findings: Sequence[Finding], detectors: Sequence[Looked]) -> str:
    """Returns what to do about the most severe finding, or how many checks found no fault."""
    faults = [finding for finding in findings if finding.is_fault]
    if not faults:
        return f"No fault found: {checks(detectors)}." if detectors else "No fault found."
    first = faults[0]
    more = f" ({len(faults) - 1} more below)" if len(faults) > 1 else ""
    begin = {"error": "Fix first", "warning": "Look at"}[first.severity]
    if first.or_else or first.says == "symptom":
        begin = "Find out"
    if first.name == UNKNOWN:
        begin = "Find the cause"
    return f"{begin}: {first.title}{more}"
