"""The first line says what to do next, and no green stands beside red."""

from __future__ import annotations

import pytest
import torch

from slime_ext.tools.analysis.document import Looked
from slime_ext.tools.analysis.findings import DETECTORS, examine
from slime_ext.tools.analysis.headline import checks, headline
from tests.tools.analysis.detectors.toys import diagnosed, edited, run


def said(rollouts):
    return headline(*examine(diagnosed(rollouts)))


def test_what_is_outside_the_healthy_range_and_unexplained_is_the_headline():
    def unlike(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        noise = 0.1 * torch.randn(r.size, generator=g)
        heavy = torch.rand(r.size, generator=g) < 0.01
        return {"proximal": (r.proximal + noise - 8.0 * heavy).clamp(max=-1e-5), "groups": None}

    assert said(edited(run(6), unlike)).startswith("Find the cause: Numbers are outside their healthy range")


def test_a_fault_a_symptom_and_nothing_begin_otherwise():
    def filled(r):
        return {"behavior": torch.where(r.segments.within % 17 == 3, 0.0, r.behavior)}

    assert said(edited(run(), filled)).startswith("Fix first: ")
    assert said(run()).startswith("No fault found: ")


def test_every_check_is_accounted_for():
    states = ["found", "nothing", "left to another", "left to another", "could not look"]
    rows = [Looked(name="off_by_one", state=state) for state in states]
    numbers = [int(word) for word in checks(rows).replace(",", "").split() if word.isdigit()]
    assert numbers == [2, 5, 2, 1] and numbers[0] + sum(numbers[2:]) == numbers[1]
    assert checks(rows[:2]) == "2 of 2 checks ran"


def test_no_fix_asks_for_what_no_engine_records():
    for detector in DETECTORS.values():
        fix = " ".join(detector.fix.split())
        assert "record log-probs from before" not in fix and "an engine reads by itself" not in fix


@pytest.mark.parametrize("name", ["engines_apart", "dropout"])
def test_a_title_does_not_name_the_one_cause_that_its_fix_leaves_open(name):
    """The fix says that kernels look the same, so the title says what was measured."""
    detector = DETECTORS[name]
    assert "kernels" in detector.fix
    assert ": " not in detector.title and "engines differ" not in f"{detector.title} {detector.what}"
