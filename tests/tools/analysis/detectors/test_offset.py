"""One side's log-probs that are off by the same number of nats at every token."""

from __future__ import annotations

import math

import pytest
import torch

from tests.tools.analysis.detectors.toys import edited, findings, run


def offset_by(nats, noise=0.01):
    def edit(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        return {"proximal": r.behavior + noise * torch.randn(r.size, generator=g) + nats}

    return edit


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_logarithm_of_a_number_of_ranks_in_the_trainers_normaliser_is_named(ranks):
    (finding,) = findings(edited(run(4), offset_by(-math.log(ranks)))).values()
    assert (finding.name, finding.severity) == ("constant_offset", "error")
    assert finding.title.startswith("The trainer's log-probs are") and f"log {ranks}." in finding.evidence
    assert finding.explains > 0.97


def test_another_offset_is_of_no_number_of_ranks():
    (finding,) = findings(edited(run(4), offset_by(-0.31))).values()
    assert finding.name == "constant_offset" and " The offset is log" not in finding.evidence


@pytest.mark.parametrize("spread", [0.5, 1.0])
def test_values_that_depend_on_the_token_are_no_offset(spread):
    """As with a set of tokens that the sampler is normalised over: l is below 0, but not the same."""

    def edit(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        return {"proximal": r.behavior - 0.7 - spread * torch.rand(r.size, generator=g)}

    assert "constant_offset" not in findings(edited(run(4), edit))


def test_noise_is_no_offset():
    assert "constant_offset" not in findings(edited(run(4), offset_by(0.0, noise=0.3)))


@pytest.mark.parametrize(("is_edge", "name"), [(True, "truncated_sampling"), (False, "constant_offset")])
def test_kept_sets_of_nearly_the_same_mass_end_at_the_logarithm_of_top_p(is_edge, name):
    """Top-p keeps 0.8 of the mass or more. The same spread to both sides is noise around an offset."""

    def edit(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        spread = torch.empty(r.size).exponential_(1 / 0.012, generator=g)
        side = torch.randint(0, 2, (r.size,), generator=g) * 2 - 1
        return {"proximal": r.behavior + math.log(0.8) + (spread if is_edge else spread * side)}

    assert set(findings(edited(run(4), edit))) == {name}
