"""Runs each detector of ``detectors/`` on a ``Diagnosis``, and returns the findings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from graphlib import TopologicalSorter
from importlib import import_module

from slime_ext.tools.analysis.detectors.shared.detector import ANY_CAUSE, Detector, Figures, Lacks, Look
from slime_ext.tools.analysis.detectors.shared.explained import Explained
from slime_ext.tools.analysis.detectors.shared.identities import ALTERED, HALF, HONEST, Record, record_of
from slime_ext.tools.analysis.document import FINDINGS, Finding, Looked, State
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure

DETECTORS_PACKAGE = "slime_ext.tools.analysis.detectors"
SPOILT = "spoilt"  # the group of findings whose record says nothing of the sampled tokens
_MODULES = {name: import_module(f"{DETECTORS_PACKAGE}.{name}") for name in FINDINGS}


def _before(name: str, detectors: Mapping[str, Detector]) -> frozenset[str]:
    """Returns the findings that suppress this finding in the report."""
    named = detectors[name].after

    def goes_before(other: str) -> bool:
        one = detectors[other]
        # A detector that is after ANY_CAUSE comes after all others.
        is_cause = ANY_CAUSE in named and one.explains and ANY_CAUSE not in one.after
        return other in named or one.group in named or is_cause

    return frozenset(other for other in detectors if other != name and goes_before(other))


def _in_order(before: Mapping[str, Iterable[str]]) -> list[str]:
    """Returns the names, each after those that come before it, else alphabetically."""
    sorter, order = TopologicalSorter(before), []
    sorter.prepare()
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        order += ready
        sorter.done(*ready)
    return order


_ALL: dict[str, Detector] = {name: module.DETECTOR for name, module in _MODULES.items()}
BEFORE = {name: _before(name, _ALL) for name in _ALL}
DETECTORS = {name: _ALL[name] for name in _in_order(BEFORE)}
REMEDIES = {name: detector.remedy for name, detector in DETECTORS.items()}
LOOKS: dict[str, Look] = {name: _MODULES[name].look for name in DETECTORS}


def measures(vocabulary: int | None) -> dict[str, Measure]:
    """Returns an empty measure of each kind that a module of ``detectors/`` defines, by its name.

    Args:
        vocabulary: size of the model's vocabulary; None: unknown.
    """
    rooms = f"{DETECTORS_PACKAGE}."
    kinds = [kind for kind in Measure.__subclasses__() if kind.__module__.startswith(rooms)]
    return {kind.__name__: kind.of_run(vocabulary) for kind in sorted(kinds, key=lambda kind: kind.__name__)}


def examine(diagnosis: Diagnosis) -> tuple[tuple[Finding, ...], tuple[Looked, ...]]:
    """Returns the findings of a run, the most severe first, and the result of each detector.

    The first split is by the identities of ``record_of``. A cause on the wrong side is not considered, unless
    a finding on the right side leaves an unhealthy rest, or the cause claims less than half of k3. Of those
    that look alike, ``left_to_others`` suppresses all but one.
    """
    record, results = record_of(diagnosis), {name: _result(name, diagnosis) for name in DETECTORS}
    there = {name: result for name, result in results.items() if not isinstance(result, Lacks)}
    reasons = {name: _excluded(name, record, results) for name, result in there.items() if result is not None}
    kept = {name: result for name, result in there.items() if result is not None and not reasons[name]}
    shares = {name: None if "is_proven" in result else _explains(result) for name, result in kept.items()}
    left = left_to_others(shares)
    findings: dict[str, Finding] = {}
    looked = []
    state: State
    for name, detector in DETECTORS.items():
        result, detail = results[name], " ".join(detector.threshold.split())
        if isinstance(result, Lacks):
            state, detail = "could not look", str(result)
        elif name in left:
            state, detail = "left to another", left[name]
        elif alike := [other for other in findings if other in BEFORE[name] and name not in shares]:
            state, detail = "left to another", alike[0]
        elif result is None:
            state = "nothing"
        elif reasons[name]:
            state, detail = "excluded", reasons[name]
        else:
            state, findings[name] = "found", detector.finding(name, result, REMEDIES)
        looked.append(Looked(name=name, state=state, detail=detail))
    if "left_out" in findings:
        findings = {
            name: finding if name == "left_out" else _of_those_read(finding)
            for name, finding in findings.items()
        }
    return tuple(sorted(findings.values(), key=lambda finding: finding.rank)), tuple(looked)


def left_to_others(shares: Mapping[str, Explained | None]) -> dict[str, str]:
    """Returns the suppressed findings, each with the finding that suppresses it.

    A finding suppresses those that come after it (BEFORE), because they look like it or follow from it. Which
    of two looks like the other, their shares decide: if the first leaves an unhealthy rest and the second a
    healthy one (``Explained.is_less_than``), the second suppresses the first. What follows from the first
    cannot win: everything follows from a record that is SPOILT, and from a cause that is proven (it has no
    share here), and a finding after ANY_CAUSE only says that no cause was found.

    Args:
        shares: what each finding explains, in the order of DETECTORS; None: it has no share.
    """
    less: dict[str, str] = {}
    while True:
        kept: list[str] = []
        left = dict(less)
        for name in (name for name in shares if name not in less):
            before = [other for other in kept if other in BEFORE[name]]
            stand = [other for other in before if not _explains_less(other, name, shares)]
            if stand:
                left[name] = stand[0]
            elif before:
                less |= dict.fromkeys(before, name)
                break
            else:
                kept.append(name)
        else:
            return left


def _explains_less(other: str, name: str, shares: Mapping[str, Explained | None]) -> bool:
    """Returns whether ``other`` explains less than the later ``name``, which does not follow from it.

    The share of a SPOILT record does not count, however small it is. It is that of the tokens whose values
    are visibly wrong, and the others may be spoilt as well: under greedy sampling no token was drawn, but
    hardly any log-prob is 0. Whether sampling itself left such a value, its detector asks (``shared_value``).
    Nor does the share of a cause count that its search may have missed at other tokens (``may_miss``), if the
    later finding is a symptom, which is measured at all tokens that the cause reaches.
    """
    one, more = shares[other], shares[name]
    if one is None or more is None or DETECTORS[other].group == SPOILT or ANY_CAUSE in DETECTORS[name].after:
        return False
    if one.may_miss and DETECTORS[name].says == "symptom":
        return False
    return one.is_less_than(more)


def _result(name: str, diagnosis: Diagnosis) -> Figures | Lacks | None:
    """Returns the figures of a detector, None if it finds nothing, or what it lacks."""
    try:
        return LOOKS[name](diagnosis)
    except Lacks as lacks:
        return lacks


def _excluded(name: str, record: Record, results: Mapping[str, Figures | Lacks | None]) -> str:
    """Returns why the identities exclude the cause that a detector found; empty if they do not."""
    reason = record.excludes(DETECTORS[name].side)
    if not reason:
        return ""
    if record.side == HONEST:
        claimed = _explains(results[name])
        return reason if claimed and claimed.share >= HALF else ""
    altered = (_explains(results[other]) for other in DETECTORS if DETECTORS[other].side == ALTERED)
    leave_a_rest = any(explains and not explains.is_rest_healthy for explains in altered)
    return "" if leave_a_rest else reason


def _explains(result: Figures | Lacks | None) -> Explained | None:
    return None if result is None or isinstance(result, Lacks) else result.get("explains")


def _of_those_read(finding: Finding) -> Finding:
    return replace(finding, evidence=f"{finding.evidence} Shares are of the samples that could be read.")
