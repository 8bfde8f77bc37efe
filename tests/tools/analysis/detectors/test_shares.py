"""A finding that leaves an unhealthy rest does not silence one that leaves a healthy rest.

The detectors are synthetic: "first" comes before "second", and both before "third" and the fallback.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from slime_ext.tools.analysis import findings
from slime_ext.tools.analysis.detectors.shared.detector import ANY_CAUSE
from slime_ext.tools.analysis.detectors.shared.explained import LEAST, Explained
from slime_ext.tools.analysis.findings import DETECTORS, left_to_others

OPEN, WHOLE = Explained(0.6, 0.1, False), Explained(0.99, 0.01, True)
SEARCHED = OPEN._replace(may_miss=True)


@pytest.fixture(autouse=True)
def synthetic(monkeypatch):
    usual = replace(DETECTORS["part_of_run"], after=(), group="")
    detectors = {
        "record": replace(usual, group="spoilt"),
        "first": usual,
        "second": replace(usual, after=("record", "first")),
        "third": replace(usual, after=("first", "second")),
        "symptom": replace(usual, after=("first",), says="symptom"),
        "fallback": replace(usual, after=(ANY_CAUSE,)),
    }
    before = {name: frozenset(d.after) & detectors.keys() for name, d in detectors.items()}
    before["fallback"] = detectors.keys() - {"fallback"}
    monkeypatch.setattr(findings, "DETECTORS", detectors)
    monkeypatch.setattr(findings, "BEFORE", before)


CASES = {
    "both explain all": ({"first": WHOLE, "second": WHOLE}, {"second": "first"}),
    "the second explains all": ({"first": OPEN, "second": WHOLE}, {"first": "second"}),
    "both leave a rest": ({"first": OPEN, "second": OPEN._replace(share=0.9)}, {"second": "first"}),
    "the second explains less": ({"first": OPEN, "second": WHOLE._replace(share=0.5)}, {"second": "first"}),
    "the first is a bound": ({"first": OPEN._replace(is_bound=True), "second": WHOLE}, {"second": "first"}),
    "the second is at most that": (
        {"first": OPEN, "second": WHOLE._replace(is_most=True)},
        {"second": "first"},
    ),
    "the first is exact": ({"first": None, "second": WHOLE}, {"second": "first"}),
    "the second has no share": ({"first": OPEN, "second": None}, {"second": "first"}),
    "everything follows from the record": ({"record": OPEN, "second": WHOLE}, {"second": "record"}),
    "a search may have missed what the symptom has": (
        {"first": SEARCHED, "symptom": WHOLE},
        {"symptom": "first"},
    ),
    "nothing was missed, and the symptom has more": (
        {"first": OPEN, "symptom": WHOLE},
        {"first": "symptom"},
    ),
    "another cause has what the search may have missed": (
        {"first": SEARCHED, "second": WHOLE},
        {"first": "second"},
    ),
    "no cause was found": ({"first": OPEN, "fallback": WHOLE}, {"fallback": "first"}),
    "both are before the third": (
        {"first": OPEN, "second": OPEN, "third": WHOLE},
        {"first": "third", "second": "third"},
    ),
    "the third is left to the second": (
        {"first": OPEN, "second": WHOLE, "third": WHOLE},
        {"first": "second", "third": "second"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_shares_decide_between_findings_that_look_alike(case):
    shares, left = CASES[case]
    assert left_to_others(shares) == left


def test_whatever_is_found_one_finding_stands_and_no_open_one_beside_what_it_silences():
    kinds = (OPEN, WHOLE, OPEN._replace(is_bound=True), WHOLE._replace(is_most=True), None)
    for number in range(len(kinds) ** 3):
        of = [kinds[number // len(kinds) ** i % len(kinds)] for i in range(3)]
        shares = dict(zip(("first", "second", "third"), of, strict=True))
        left = left_to_others(shares)
        kept = [name for name in shares if name not in left]
        assert kept, shares
        for name, other in left.items():
            one, more = shares[other], shares[name]
            assert other in findings.BEFORE[name] or one.is_rest_healthy, shares
            assert one is None or more is None or other not in kept or not one.is_less_than(more), shares


@pytest.mark.parametrize(("share", "is_cause"), [(LEAST / 2, False), (LEAST, True)])
def test_a_bound_that_leaves_nearly_all_of_k3_open_is_no_cause(share, is_cause):
    assert Explained(share, 0.0, False, is_bound=True).is_cause is is_cause
    assert Explained(share, 0.0, True, is_bound=True).is_cause
