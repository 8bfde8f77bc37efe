"""Findings in plain words: one detector for each row of faults.yaml, each looking at a ``Diagnosis``."""

from __future__ import annotations

from slime_ext.analysis.diagnosis import Diagnosis
from slime_ext.analysis.document import Finding, Looked
from slime_ext.analysis.findings import inside, log_probs, numerics, push, sampling, selection, turns, weights
from slime_ext.analysis.findings.detector import Fault, Lacks, faults

FAULTS = faults()
MODULES = (log_probs, turns, sampling, push, weights, inside, numerics, selection)
DETECTORS = {detect.__name__: detect for module in MODULES for detect in module.DETECTORS}
ORDER = {"error": 0, "warning": 1, "note": 2}


def examine(diagnosis: Diagnosis) -> tuple[tuple[Finding, ...], tuple[Looked, ...]]:
    """The faults of a run, the gravest first, and what each detector did."""
    found: dict[str, Finding] = {}
    looked = []
    for fault in FAULTS:
        state, detail = _look(fault, diagnosis, found)
        looked.append(Looked(name=fault.name, state=state, detail=detail))
    return tuple(sorted(found.values(), key=lambda finding: ORDER[finding.severity])), tuple(looked)


def _look(fault: Fault, diagnosis: Diagnosis, found: dict[str, Finding]) -> tuple[str, str]:
    """State and detail of a detector's row; what it finds goes to ``found``."""
    try:
        figures = DETECTORS[fault.name](diagnosis)
    except Lacks as lacks:
        return "could not look", str(lacks)
    if alike := [name for name in found if name in fault.after]:
        return "left to another", alike[0]
    if figures is None:
        return "nothing", fault.threshold
    found[fault.name] = fault.finding(figures)
    return "found", fault.threshold
