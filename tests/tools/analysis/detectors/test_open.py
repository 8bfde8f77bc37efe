"""Where several causes remain, a finding says how to tell them apart and what to do about each."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from slime_ext.tools.analysis import detectors as room
from slime_ext.tools.analysis.detectors.shared.along import along, falls
from slime_ext.tools.analysis.detectors.shared.twice import unrepeated
from slime_ext.tools.analysis.document import FINDINGS
from slime_ext.tools.analysis.findings import DETECTORS, examine
from tests.tools.analysis.detectors.toys import Policy, diagnosed, edited, findings, run

SYMPTOMS = {name for name, detector in DETECTORS.items() if detector.says == "symptom"}


def of_module(name):
    return ast.parse((Path(room.__file__).parent / f"{name}.py").read_text())


def alternatives():
    """The findings that the source of some detector names beside its own, and those detectors themselves.

    A name in a function of a detector's module is such an alternative, as nothing else is asked by name.
    """
    names = set()
    for name in FINDINGS:
        functions = [node for node in of_module(name).body if isinstance(node, ast.FunctionDef)]
        leaves = [leaf for function in functions for leaf in ast.walk(function)]
        strings = {leaf.value for leaf in leaves if isinstance(leaf, ast.Constant)}
        if "or_else" in strings:
            names |= ({name} | (strings & set(FINDINGS))) - SYMPTOMS
    return names | {"rollouts_apart"}  # a symptom that stale_weights names


def test_every_cause_that_may_remain_beside_another_has_a_remedy():
    known = alternatives()
    assert len(known) > 20 and {name for name in known if not DETECTORS[name].remedy} == set()
    remedies = [" ".join(detector.remedy.split()) for detector in DETECTORS.values() if detector.remedy]
    assert all(one[0].islower() and not one.endswith(".") for one in remedies)


def noisy():
    """The trainer's logits rounded, which the text decides."""
    return run(6, noise=0.1)


def falling():
    """A difference that matters less and less along the response."""

    def edit(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        moved = 0.5 * torch.randn(r.size, generator=g) * torch.exp(-r.segments.within / 20.0)
        return {"proximal": (r.proximal + moved - moved**2 / 2).clamp(max=-1e-6), "groups": None}

    return edited(run(6), edit)


@pytest.mark.parametrize(("make", "name"), [(noisy, "quantised"), (falling, "prompt_cut")])
def test_the_fix_treats_each_cause_and_tells_them_apart(make, name):
    finding = findings(make())[name]
    causes = (finding.name, *finding.or_else)
    assert len(causes) > 1 and finding.fix.startswith("To tell which: ")
    for cause in causes:
        remedy = " ".join(DETECTORS[cause].remedy.split())
        assert f"f it is {cause}, {remedy}" in finding.fix
    assert f"Either {' or '.join(causes)}: " in finding.title
    assert "lower precision" not in finding.title and "different prompts" not in finding.title


@pytest.mark.parametrize(("begin", "is_open"), [(4, False), (40, True)])
def test_an_attention_that_fails_further_on_remains_only_before_all_tokens(begin, is_open):
    """No token differs more than another, so a position before the first token is all that remains."""
    moved = edited(noisy(), lambda r: {"prompt_lengths": (begin,) * r.count})
    finding = findings(moved)["quantised"]
    assert ("kv_precision" in finding.or_else) == is_open
    assert ("whether tokens agree at positions below 32" in finding.ruled_out) == is_open
    assert ("sample prompts of less than 32 tokens" in finding.fix) == is_open


def test_precision_beside_weights_that_never_arrive_has_a_step_that_tells_it():
    policy = Policy(moves=0.3)
    finding = findings(run(6, policy=policy, sampler=policy.table.clone(), noise=0.1))["stale_weights"]
    assert finding.or_else == ("growing_mismatch", "partial_push", "quantised")
    assert "record ref_log_probs" in finding.fix
    assert "sample rollouts 0 to 2 without fp8 or int8 weights" in finding.fix


def test_the_same_text_is_said_to_be_scored_alike_only_if_it_was():
    """Both sides score it otherwise each time, so neither side alone does."""
    assert "The same text has the same log-probs each time" in findings(noisy())["quantised"].evidence

    def unsteady(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        both = 0.12 * torch.randn(2, r.size, generator=g)
        return {
            "proximal": (r.proximal + both[0]).clamp(max=-1e-6),
            "behavior": (r.behavior + both[1]).clamp(max=-1e-6),
        }

    finding = findings(edited(run(6), unsteady))["quantised"]
    assert "the same log-probs each time" not in finding.evidence and "dropout" in finding.or_else


def test_what_fades_along_the_response_is_another_text_and_no_precision():
    """Equally certain tokens are further off early than late, as no weights and no rounding make them."""

    def fading(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        moved = 0.35 * torch.randn(r.size, generator=g) * torch.exp(-r.segments.within / 55.0)
        return {"proximal": (r.proximal + moved - moved**2 / 2).clamp(max=-1e-6), "groups": None}

    d = diagnosed(edited(run(8), fading))
    drift = along(d)
    assert drift.early < 2 * drift.late and drift.first > 1.7 * drift.last
    (finding,) = examine(d)[0]
    assert (finding.name, finding.or_else) == ("prompt_cut", ("prefix_mismatch", "layer"))


def test_where_text_is_scored_otherwise_each_time_no_other_weights_are_the_cause():
    """However far off they are: of other weights, each text has one value."""

    def unsteady(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        moved = 0.3 * torch.randn(r.size, generator=g)
        return {"proximal": (r.proximal + moved).clamp(max=-1e-6)}

    loud = run(6, noise=0.4)
    steady, shaken = (findings(rollouts)["quantised"] for rollouts in (loud, edited(loud, unsteady)))
    assert {"another_policy", "resumed_wrong_weights"} & set(steady.or_else)
    assert shaken.or_else == ("dropout", "layer")


@pytest.mark.parametrize(("unsteady", "names"), [(0.3, {"quantised"}), (0.6, {"dropout"})])
def test_a_trainer_is_unsteady_only_if_that_makes_most_of_the_distance(unsteady, names):
    """Rounded weights are far off at the same text each time, and dropout differs each time."""

    def edit(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        moved = unsteady * torch.randn(r.size, generator=g)
        return {"proximal": (r.proximal + moved - moved**2 / 2).clamp(max=-1e-6)}

    rollouts = edited(noisy(), edit)
    found = findings(rollouts)
    assert set(found) == names
    assert unrepeated(diagnosed(rollouts), "trainer")  # packing_leak asks whether it differs at all
    assert "dropout" in {"dropout" if "dropout" in found else "", *found[names.pop()].or_else}


@pytest.mark.parametrize("is_noisy", [False, True])
def test_a_replay_is_not_advised_where_the_same_experts_differ_as_well(is_noisy):
    figures = {"tokens": 30, "of": 90, "apart": 1.6, "same": 0.08, "lowest": 0.9, "layer": 1, "overlap": 0.93}
    figures |= {"expert": 1, "missed": 0.2, "is_noisy": is_noisy}
    finding = DETECTORS["expert_routing"].finding("expert_routing", figures, {})
    assert finding.fix.startswith("Replay the sampler's experts") != is_noisy
    assert ("too far for bfloat16" in finding.evidence) == ("will not help" in finding.fix) == is_noisy


@pytest.mark.parametrize("is_early", [False, True])
def test_a_response_whose_sides_are_equal_early_or_late_falls_only_if_it_is_late(is_early):
    """A quarter without any distance has no relative error."""

    def edit(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        at = r.segments.within < 20 if is_early else r.segments.within >= 40
        moved = 0.3 * torch.randn(r.size, generator=g) * at
        return {"proximal": (r.behavior + moved - moved**2 / 2).clamp(max=-1e-6)}

    d = diagnosed(edited(run(8), edit))
    drift = along(d)
    assert (drift.late if is_early else drift.early) == 0
    assert falls(d) == is_early
