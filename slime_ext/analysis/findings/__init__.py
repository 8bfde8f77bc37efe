"""Findings in plain words: one detector for each fault, each looking at a ``Diagnosis``.

A detector that stands on another's evidence (everything looks noisy when log-probs are shifted by one) stays
silent where that one has spoken: ``after``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime_ext.analysis.document import Finding

if TYPE_CHECKING:
    from slime_ext.analysis.diagnosis import Diagnosis

Detect = Callable[["Diagnosis"], Finding | None]
FEW = 0.75  # share of sum l^2 in 1% of the tokens above which these few make every mean
# Nothing else can be told from such log-probs.
SPOILT = ("positive_log_probs", "off_by_one", "greedy_sampling", "tool_tokens")
ORDER = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class Detector:
    """A fault's name and what looks for it; silent where one of ``after`` was found."""

    name: str
    detect: Detect
    after: tuple[str, ...] = ()


def detectors() -> tuple[Detector, ...]:
    """All of them, in the order in which they look."""
    from slime_ext.analysis.findings import (
        alignment,
        cache,
        drift,
        greedy,
        masks,
        missing,
        numerics,
        sampling,
        staleness,
        unexplained,
    )

    rooms = (missing, alignment, greedy, masks, sampling, staleness, cache, drift, numerics)
    named = tuple(detector for room in rooms for detector in room.DETECTORS)
    return (*named, unexplained.after_all(named))


def find(diagnosis: Diagnosis) -> tuple[Finding, ...]:
    """What is wrong, the gravest first."""
    found: dict[str, Finding] = {}
    for detector in detectors():
        if not found.keys() & set(detector.after):
            finding = detector.detect(diagnosis)
            if finding is not None:
                found[detector.name] = finding
    return tuple(sorted(found.values(), key=lambda finding: ORDER[finding.severity]))
