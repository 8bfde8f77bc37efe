"""Findings in plain words: one detector for each fault, each looking at a ``Diagnosis``."""

from __future__ import annotations

from slime_ext.analysis.diagnosis import Diagnosis
from slime_ext.analysis.document import Finding
from slime_ext.analysis.findings import log_probs, numerics, sampling, weights
from slime_ext.analysis.findings.detector import detector

# Each with its faults in the order in which they are looked for.
NAMED = (*log_probs.DETECTORS, *sampling.DETECTORS, *weights.DETECTORS, *numerics.DETECTORS)
DETECTORS = (
    *NAMED,
    detector("warning", after=NAMED)(numerics.unexplained),
)
ORDER = {"error": 0, "warning": 1, "note": 2}


def find(diagnosis: Diagnosis) -> tuple[Finding, ...]:
    """The faults of a run, the gravest first."""
    found: dict[str, Finding] = {}
    for fault in DETECTORS:
        if not found.keys() & fault.after and (detected := fault.detect(diagnosis)):
            found[fault.name] = Finding(name=fault.name, severity=fault.severity, **detected._asdict())
    return tuple(sorted(found.values(), key=lambda finding: ORDER[finding.severity]))
