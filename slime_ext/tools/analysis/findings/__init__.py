"""Findings in plain words: one detector for each row of faults.yaml, each looking at a ``Diagnosis``."""

from __future__ import annotations

from slime_ext.tools.analysis.document import Finding, Looked
from slime_ext.tools.analysis.findings import (
    gross,
    inside,
    log_probs,
    numerics,
    push,
    reward,
    sampling,
    selection,
    turns,
    weights,
)
from slime_ext.tools.analysis.findings.detector import Fault, Lacks, faults
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

MODULES = (gross, log_probs, turns, sampling, push, weights, inside, numerics, selection, reward)
FAULTS = faults()
# The function of a finding's name in one of these modules.
DETECTORS = {name: getattr(module, name) for name in FAULTS for module in MODULES if hasattr(module, name)}


def examine(diagnosis: Diagnosis) -> tuple[tuple[Finding, ...], tuple[Looked, ...]]:
    """The faults of a run, the gravest first, and what each detector did."""
    found: dict[str, Finding] = {}
    looked = []
    for name, fault in FAULTS.items():
        state, detail = _look(name, fault, diagnosis, found)
        looked.append(Looked(name=name, state=state, detail=detail))
    if "left_out" in found:
        found = {
            name: finding if name == "left_out" else _of_those_read(finding)
            for name, finding in found.items()
        }
    return tuple(sorted(found.values(), key=lambda finding: finding.rank)), tuple(looked)


def _of_those_read(finding: Finding) -> Finding:
    return finding.model_copy(
        update={"evidence": f"{finding.evidence} Shares are of those samples that were read."}
    )


def _look(name: str, fault: Fault, diagnosis: Diagnosis, found: dict[str, Finding]) -> tuple[str, str]:
    try:
        figures = DETECTORS[name](diagnosis)
    except Lacks as lacks:
        return "could not look", str(lacks)
    if alike := [other for other in found if other in fault.after]:
        return "left to another", alike[0]
    if figures is None:
        return "nothing", fault.template.threshold
    found[name] = fault.finding(figures)
    return "found", fault.template.threshold
