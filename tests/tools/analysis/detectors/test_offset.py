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
