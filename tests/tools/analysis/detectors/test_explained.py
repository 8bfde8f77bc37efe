"""The share of k3 that a finding explains, against planted parts."""

from __future__ import annotations

import functools
import random
import statistics
from pathlib import Path

import pytest
import torch

from slime_ext.tools.analysis import detectors as room
from slime_ext.tools.analysis.detectors.shared.explained import (
    BFLOAT16_K3,
    K3,
    LEAST_ERROR,
    VALUES,
    explained,
    explained_by_values,
    whole_run,
)
from slime_ext.tools.analysis.detectors.shared.same_text import explained_by_masses, explained_by_temperature
from slime_ext.tools.analysis.detectors.shared.surprise import BySurprise
from slime_ext.tools.analysis.findings import DETECTORS, examine
from tests.tools.analysis.detectors.test_steps import damaged
from tests.tools.analysis.detectors.toys import diagnosed, edited, findings, run


def test_the_share_is_what_goes_if_far_tokens_become_like_the_rest():
    """By definition: sums of k3 before and after the far tokens get the mean of the others."""
    far, rest = [0.5] * 30, [0.002] * 170
    before, after = sum(far) + sum(rest), 200 * 0.002
    found = explained(K3(30, 0.5, 0.0), K3(170, 0.002, 0.0))
    assert found.share == pytest.approx((before - after) / before)
    assert found.is_rest_healthy and not explained(K3(30, 0.5, 0.0), K3(170, 0.02, 0.0)).is_rest_healthy
    assert explained(K3(0, 0.0, 0.0), K3(9, 0.0, 0.0)).share == 0


def test_the_error_is_that_of_many_draws():
    """Of both means, and of what the far tokens would have without the cause."""
    draw = random.Random(1)

    def share():
        far, rest = draw.gauss(0.05, 0.01), draw.gauss(0.01, 0.002)
        left = rest * (1 + draw.gauss(0, 0.5))
        return 100 * (far - left) / (100 * far + 300 * rest)

    found = explained(K3(100, 0.05, 0.01), K3(300, 0.01, 0.002))
    assert found.error == pytest.approx(statistics.stdev(share() for _ in range(4000)), rel=0.1)
    assert explained(K3(100, 0.05, 0.0), K3(300, 0.0, 0.0)).error == LEAST_ERROR


def test_a_share_is_about_at_least_or_with_its_error():
    """At most: what two correct engines make is in it. At least: others may have the same cause."""
    far, near, loud = K3(100, 0.1, 0.0), K3(300, 1e-3, 0.0), K3(300, 0.02, 0.0)
    assert str(explained(far, near)) == "This explains 96% ± 1% of k3; the rest is healthy."
    assert "so it has another cause as well" in str(explained(far, loud))
    assert str(explained(far, near).of_chosen()) == "This explains 96% ± 2% of k3; the rest is healthy."
    chosen = explained(far, loud).of_chosen()
    assert str(chosen).startswith(
        "This explains at least 50% of k3; the rest is not healthy, and has the same"
    )
    assert chosen.share + 2 * chosen.error == pytest.approx(1) and not chosen.is_cause
    any_noise = explained(far, near).of_any(0.02)
    assert str(any_noise) == "This explains about 96% of k3; the rest is healthy."
    assert any_noise.error == pytest.approx(BFLOAT16_K3 / 0.02 / 2, rel=0.1)


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


@functools.cache
def beside(noise):
    """Rollouts with noise, and their k3: made once for all that is planted beside it."""
    rollouts = edited(run(6), noisy(noise))
    return rollouts, k3_of(rollouts)


@pytest.mark.parametrize("size", [0.0, 0.1, 0.3])
def test_filled_values_explain_what_was_planted_beside_noise(size):
    def filled(r):
        return {"behavior": torch.where(r.segments.within % 23 == 3, 0.0, r.behavior)}

    alone, k3 = beside(size)
    d = diagnosed(edited(alone, filled))
    planted = 1 - k3 / whole_run(d)[1]
    one = next(finding for finding in examine(d)[0] if finding.name == "shared_value")
    assert one.explains == pytest.approx(planted, abs=0.03)
    assert one.severity == ("error" if size < 0.1 else "warning"), one.evidence


@pytest.mark.parametrize("size", [0.0, 0.2])
def test_a_temperature_explains_what_was_planted_although_entropies_scatter(size):
    """From tokens after the same text. By certainty alone, much less would be explained."""
    cold = run(8, warp=lambda logits, seen, at: logits / 0.75)
    both = edited(cold, noisy(size))
    d = diagnosed(both)
    planted = k3_of(cold) / whole_run(d)[1] if size else 1.0
    kinds = d.of(BySurprise).sums[:, VALUES]
    by_text, by_certainty = explained_by_temperature(d, kinds), explained_by_values(d, kinds)
    assert by_text.share == pytest.approx(planted, abs=0.08)
    assert by_certainty.is_bound and by_certainty.share < by_text.share - 0.1


def test_a_top_p_explains_what_was_planted():
    def kept(logits, seen, at):
        return logits.masked_fill(logits < logits.topk(6, dim=1).values[:, -1:], -torch.inf)

    d = diagnosed(run(8, warp=kept))
    assert explained_by_masses(d, d.of(BySurprise).sums[:, VALUES]).share > 0.95


def of_engine(r):
    """One of four engines has other weights."""
    g = torch.Generator().manual_seed(r.rollout_id)
    moved = 0.6 * torch.randn(r.size, generator=g) * (r.segments.ids % 4 == 0)
    names = tuple("a" if i % 4 == 0 else "b" for i in range(r.count))
    return {"proximal": r.proximal + moved - moved**2 / 2, "engines": names, "groups": None}


def falling(r):
    """Another prompt: far at the first tokens, and less and less further on."""
    g = torch.Generator().manual_seed(r.rollout_id)
    moved = 0.5 * torch.randn(r.size, generator=g) * torch.exp(-r.segments.within / 20.0)
    return {"proximal": r.proximal + moved - moved**2 / 2, "groups": None}


def of_other_sample(r):
    """Every fourth sample has the log-probs of the sample after it."""
    rows = r.behavior.view(r.count, -1).clone()
    rows[::4] = rows[1::4]
    return {"behavior": rows.flatten()}


def lost(r):
    return {"behavior": torch.where(r.segments.within % 23 == 3, 0.0, r.behavior)}


def rounded(r):
    """Noise at every token, as other arithmetic makes it."""
    g = torch.Generator().manual_seed(60 + r.rollout_id)
    moved = 0.3 * torch.randn(r.size, generator=g)
    return {"proximal": r.proximal + moved - moved**2 / 2, "groups": None}


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("edit", [of_engine, falling, of_other_sample, lost, rounded])
def test_what_was_planted_is_within_two_errors(edit, noise):
    """Whether the finding names all tokens of the cause or not. What it says about, it does not know."""
    alone, k3 = beside(noise)
    d = diagnosed(edited(alone, edit))
    planted = 1 - k3 / whole_run(d)[1]
    said = [f for f in examine(d)[0] if f.explains is not None]
    for finding in said:
        off = abs(finding.explains - planted)
        assert off <= 2 * finding.explains_error or "explains about" in finding.evidence, finding
    assert said or noise


def test_every_cause_that_explains_a_distance_says_how_much():
    """Except where no token can be compared, or the dump does not tell which tokens it is."""
    silent = {"other_run", "positive_log_probs", "repeated_routes", "unexplained"}
    for name, detector in DETECTORS.items():
        text = (Path(room.__file__).parent / f"{name}.py").read_text()
        says = any(word in text for word in ('"explains"', "unsteady(", "sparse(d)", "grown.figures()"))
        assert says or not detector.explains or name in silent, name
