"""The share of k3 that a finding explains, against planted parts."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import pytest
import torch

from slime_ext.tools.analysis import detectors as room
from slime_ext.tools.analysis.detectors.shared.explained import (
    K3,
    VALUES,
    explained,
    explained_by_values,
    whole_run,
)
from slime_ext.tools.analysis.detectors.shared.same_text import explained_by_masses, explained_by_temperature
from slime_ext.tools.analysis.detectors.shared.surprise import BySurprise
from slime_ext.tools.analysis.findings import DETECTORS
from tests.tools.analysis.detectors.test_steps import damaged
from tests.tools.analysis.detectors.toys import diagnosed, edited, findings, run


def test_the_share_is_what_goes_if_far_tokens_become_like_the_rest():
    """By definition: sums of k3 before and after the far tokens get the mean of the others."""
    far, rest = [0.5] * 30, [0.002] * 170
    before, after = sum(far) + sum(rest), 200 * 0.002
    found = explained(K3(30, 0.5, 0.0), K3(170, 0.002, 0.0))
    assert found.share == pytest.approx((before - after) / before) and found.error == 0
    assert found.is_rest_healthy and not explained(K3(30, 0.5, 0.0), K3(170, 0.02, 0.0)).is_rest_healthy
    assert explained(K3(0, 0.0, 0.0), K3(9, 0.0, 0.0)).share == 0


def test_the_error_is_that_of_many_draws():
    draw = random.Random(1)

    def means():
        return (draw.gauss(0.05, 0.01), draw.gauss(0.01, 0.002))

    shares = [explained(K3(100, a, 0.0), K3(300, b, 0.0)).share for a, b in (means() for _ in range(4000))]
    found = explained(K3(100, 0.05, 0.01), K3(300, 0.01, 0.002))
    assert found.error == pytest.approx(statistics.stdev(shares), rel=0.1)


def test_a_finding_says_it_and_is_no_error_beside_an_unhealthy_rest():
    (alone,) = findings(edited(run(8), damaged(5))).values()
    assert alone.severity == "error" and alone.explains > 0.99 and alone.explains_error < 0.01
    assert alone.evidence.endswith("of k3; the rest is healthy.")

    def engine(noise):
        def edit(r):
            g = torch.Generator().manual_seed(r.rollout_id)
            is_far = r.segments.ids % 4 == 0
            shift = torch.where(is_far, 0.8, noise) * torch.randn(r.size, generator=g)
            names = tuple("a" if i % 4 == 0 else "b" for i in range(r.count))
            return {"proximal": (r.proximal + shift).clamp(max=-1e-6), "engines": names, "groups": None}

        return findings(edited(run(6), edit))["part_of_run"]

    assert [engine(noise).severity for noise in (0.01, 0.15)] == ["error", "warning"]
    assert "has another cause as well" in engine(0.15).evidence


def k3_of(rollouts):
    d = diagnosed(rollouts)
    return whole_run(d)[1]


def noisy(size):
    def edit(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        return {"proximal": r.proximal + size * torch.randn(r.size, generator=g) - size**2 / 2}

    return edit


@pytest.mark.parametrize("size", [0.0, 0.1, 0.3])
def test_filled_values_explain_what_was_planted_beside_noise(size):
    def filled(r):
        return {"behavior": torch.where(r.segments.within % 23 == 3, 0.0, r.behavior)}

    alone, both = edited(run(6), noisy(size)), edited(edited(run(6), noisy(size)), filled)
    planted = 1 - k3_of(alone) / k3_of(both)
    one = findings(both)["shared_value"]
    assert one.explains == pytest.approx(planted, abs=0.03)
    assert one.severity == ("error" if size < 0.1 else "warning"), one.evidence


@pytest.mark.parametrize("size", [0.0, 0.2])
def test_a_temperature_explains_what_was_planted_although_entropies_scatter(size):
    """From tokens after the same text. By certainty alone, much less would be explained."""
    cold = run(8, warp=lambda logits, seen, at: logits / 0.75)
    both = edited(cold, noisy(size))
    planted = 1 - (k3_of(both) - k3_of(cold)) / k3_of(both) if size else 1.0
    d = diagnosed(both)
    kinds = d.of(BySurprise).sums[:, VALUES]
    by_text, by_certainty = explained_by_temperature(d, kinds), explained_by_values(d, kinds)
    assert by_text.share == pytest.approx(planted, abs=0.08)
    assert by_certainty.is_bound and by_certainty.share < by_text.share - 0.1


def test_a_top_p_explains_what_was_planted():
    def kept(logits, seen, at):
        return logits.masked_fill(logits < logits.topk(6, dim=1).values[:, -1:], -torch.inf)

    d = diagnosed(run(8, warp=kept))
    assert explained_by_masses(d, d.of(BySurprise).sums[:, VALUES]).share > 0.95


def test_every_cause_that_explains_a_distance_says_how_much():
    """Except where no token can be compared, or the dump does not tell which tokens it is."""
    silent = {"other_run", "positive_log_probs", "repeated_routes", "unexplained"}
    for name, detector in DETECTORS.items():
        text = (Path(room.__file__).parent / f"{name}.py").read_text()
        says = any(word in text for word in ('"explains"', "unrepeated(", "sparse(d)", "grown.figures()"))
        assert says or not detector.explains or name in silent, name
