"""The share of k3 that a finding explains, against planted parts."""

from __future__ import annotations

import random
import statistics

import pytest
import torch

from slime_ext.tools.analysis.detectors.shared.explained import K3, explained
from tests.tools.analysis.detectors.test_steps import damaged
from tests.tools.analysis.detectors.toys import edited, findings, run


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
