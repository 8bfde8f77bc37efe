"""An error needs a figure that is beyond its limit by more than chance; otherwise it is a warning."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from slime_ext.tools.analysis.detectors import logit_bias, off_by_one, scaled_log_probs, shared_place
from slime_ext.tools.analysis.detectors.shared.detector import Margin
from slime_ext.tools.analysis.findings import DETECTORS, examine
from slime_ext.tools.analysis.measures.layer_outputs import LayerDistance, _median
from tests.tools.analysis.detectors.test_layers import ROUNDOFF, rounded
from tests.tools.analysis.detectors.toys import Policy, diagnosed, edited, findings, run


@pytest.mark.parametrize(("error", "severity"), [(0.0, "error"), (0.03, "error"), (0.04, "warning")])
def test_within_three_standard_errors_of_its_limit_a_figure_makes_a_warning(error, severity):
    figures = {"after": 0.4, "pure": 0.1, "margin": Margin(0.4, error, 0.3)}
    made = DETECTORS["stale_cache"].finding("stale_cache", figures, {})
    assert made.severity == severity
    assert made.evidence.endswith("the limit 0.3, so this is a warning.") == (severity == "warning")


@pytest.mark.parametrize(("distance", "error", "is_sure"), [(66, 0, True), (66, 1, False), (70, 1, True)])
def test_a_layer_is_an_error_only_beyond_what_weights_in_4_bits_make(distance, error, is_sure):
    d = rounded(0.25)
    d.layers = (LayerDistance(0, distance * ROUNDOFF, ROUNDOFF, error * ROUNDOFF),)
    (layer,) = examine(d)[0]
    assert layer.name == "layer" and (layer.severity == "error") == is_sure == (not layer.or_else)


def test_the_error_of_a_median_is_that_of_many_draws():
    g = torch.Generator().manual_seed(3)

    def draw():
        return _median(
            [level + 0.01 * torch.randn(50, generator=g) for level in torch.randn(16, generator=g)]
        )

    drawn = [draw() for _ in range(400)]
    medians, errors = (torch.tensor(column) for column in zip(*drawn, strict=True))
    assert float(errors.mean()) == pytest.approx(float(medians.std()), rel=0.3)


@pytest.mark.parametrize(("size", "severity"), [(0.062, "warning"), (0.2, "error")])
def test_engines_that_hardly_differ_more_than_bfloat16_are_a_warning(size, severity):
    """The sampler scores the same text with independent noise in each sample."""

    def noisy(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        return {"behavior": (r.behavior + size * torch.randn(r.size, generator=g)).clamp(max=-1e-6)}

    found = findings(edited(run(6, noise=0.0), noisy))
    assert found["engines_apart"].severity == severity
    assert ("standard errors of the limit 0.04" in found["engines_apart"].evidence) == (severity == "warning")


@pytest.mark.parametrize(("size", "is_apart"), [(0.1, False), (0.4, True)])
def test_one_engine_of_eight_is_seen_in_the_squares_and_is_a_warning(size, is_apart):
    """The mean difference stays below 0.04 nats, because seven of eight samples have none."""

    def one(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        is_off = r.segments.ids % 8 == 0
        shift = is_off * (size * torch.randn(r.size, generator=g) - size**2 / 2)
        return {"behavior": (r.behavior + shift).clamp(max=-1e-6)}

    found = findings(edited(run(6), one))
    assert ("engines_apart" in found) is is_apart


def shifted(seed, noise=0.0, share=1.0):
    """A share of the responses has log-probs that come one token late."""

    def edit(r):
        g = torch.Generator().manual_seed(seed)
        behavior = r.behavior.view(r.count, -1).roll(1, 1).flatten()
        behavior = behavior + noise * torch.randn(r.size, generator=g)
        return {"behavior": torch.where(r.segments.ids < share * r.count, behavior, r.behavior)}

    return edit


def biased(seed, size=0.5, noise=0.1):
    """The commonest token is off by as much in every context, and by some noise."""

    def edit(r):
        g = torch.Generator().manual_seed(seed)
        is_it = r.tokens == int(r.tokens.mode().values)
        return {"proximal": r.proximal + is_it * (size + noise * torch.randn(r.size, generator=g))}

    return edit


def far_at_the_end(seed, size=0.5, noise=0.2):
    """The last token of each response is off."""

    def edit(r):
        g = torch.Generator().manual_seed(seed)
        is_last = r.segments.within == r.lengths[0] - 1
        shift = size + noise * torch.randn(r.size, generator=g)
        return {"proximal": torch.where(is_last, r.behavior - shift, r.behavior)}

    return edit


def scaled(seed, factor=1.1):
    return lambda r: {"proximal": factor * r.behavior}


MARGINS = [(off_by_one, shifted), (logit_bias, biased), (shared_place, far_at_the_end)]
MARGINS += [(scaled_log_probs, scaled)]


@cache
def many_draws():
    """60 rollouts of one policy, for every margin."""
    policy = Policy(moves=0.0)
    return [run(1, policy=policy, noise=0.0) for _ in range(60)]


@pytest.mark.parametrize(("detector", "edit"), MARGINS)
def test_the_error_of_a_margin_is_that_of_many_draws(detector, edit):
    drawn = (edited(rollouts, edit(seed)) for seed, rollouts in enumerate(many_draws()))
    margins = [detector.look(diagnosed(rollouts))["margin"] for rollouts in drawn]
    values, errors, _ = torch.tensor(margins).unbind(1)
    assert float(errors.mean()) == pytest.approx(float(values.std()), rel=0.35)


@pytest.mark.parametrize(
    ("name", "edit", "severity"),
    [
        ("off_by_one", shifted(0), "error"),
        ("off_by_one", shifted(0, share=0.06), "warning"),  # four responses
        ("logit_bias", biased(0), "error"),
        ("logit_bias", biased(0, size=0.11, noise=0.05), "warning"),
        ("shared_place", far_at_the_end(0), "error"),
        ("shared_place", far_at_the_end(0, size=0.11, noise=0.1), "warning"),
        ("scaled_log_probs", scaled(0), "error"),
        ("scaled_log_probs", scaled(0, factor=1.0041), "warning"),
    ],
)
def test_a_figure_within_three_errors_of_its_limit_is_a_warning(name, edit, severity):
    found = findings(edited(run(1, noise=0.0), edit))
    assert found[name].severity == severity, found[name].evidence
    assert ("standard errors of the limit" in found[name].evidence) == (severity == "warning")
