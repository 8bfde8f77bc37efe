"""Findings in plain words: one detector for each fault, each looking at a ``Diagnosis``."""

from __future__ import annotations

from slime_ext.analysis.diagnosis import Diagnosis
from slime_ext.analysis.document import Finding, Looked
from slime_ext.analysis.findings import log_probs, numerics, sampling, selection, turns, weights
from slime_ext.analysis.findings.detector import Detector, detector, tokens

# Each after the faults that look like it.
NAMED: tuple[Detector, ...] = (
    *log_probs.DETECTORS,
    *turns.DETECTORS,
    *sampling.DETECTORS,
    *weights.DETECTORS,
    *numerics.DETECTORS,
)
DETECTORS = (
    *NAMED,
    detector(
        "warning",
        after=NAMED,
        needs=tokens(numerics.FEWEST_TOKENS),
        threshold=f"{numerics.UNEXPLAINED} nats, five times what bfloat16 makes, by 3 standard errors",
        ruled_out=(
            "Every detector above that could look found nothing; those that could not are in the table."
        ),
    )(numerics.unexplained),
    *selection.DETECTORS,
)
ORDER = {"error": 0, "warning": 1, "note": 2}


def examine(diagnosis: Diagnosis) -> tuple[tuple[Finding, ...], tuple[Looked, ...]]:
    """The faults of a run, the gravest first, and what each detector did."""
    found: dict[str, Finding] = {}
    looked = []
    for fault in DETECTORS:
        state, detail = _look(fault, diagnosis, found)
        looked.append(Looked(name=fault.name, state=state, detail=detail))
    return tuple(sorted(found.values(), key=lambda finding: ORDER[finding.severity])), tuple(looked)


def _look(fault: Detector, diagnosis: Diagnosis, found: dict[str, Finding]) -> tuple[str, str]:
    """State and detail of a detector's row; what it finds goes to ``found``."""
    if lacks := fault.needs(diagnosis):
        return "could not look", lacks
    if alike := [name for name in found if name in fault.after]:
        return "left to another", alike[0]
    detected = fault.detect(diagnosis)
    if detected is None:
        return "nothing", fault.threshold
    said = detected._asdict() | {"ruled_out": detected.ruled_out or fault.ruled_out}
    found[fault.name] = Finding(name=fault.name, severity=fault.severity, threshold=fault.threshold, **said)
    return "found", fault.threshold


def find(diagnosis: Diagnosis) -> tuple[Finding, ...]:
    """The faults of a run, the gravest first."""
    return examine(diagnosis)[0]
