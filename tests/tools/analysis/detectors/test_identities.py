"""The mean ratio over drawn tokens is 1 for honest policies, at each place and in each rollout."""

from __future__ import annotations

import pytest
import torch

from slime_ext.tools.analysis.detectors.shared.identities import is_above_one, mean_ratios
from tests.tools.analysis.detectors.toys import diagnosed, edited, run
from tests.tools.analysis.rollouts import rollout

SAMPLES, LENGTH, KINDS = 48, 12, 6


def honest(seed, distance=0.5, dtype=torch.float64):
    """Tokens of random policies q, each context its own, and a trainer p at some distance: by definition."""
    g = torch.Generator().manual_seed(seed)
    size = SAMPLES * LENGTH
    logits = torch.randn(size, KINDS, generator=g, dtype=dtype)
    q = logits.log_softmax(-1)
    p = (logits + distance * torch.randn(size, KINDS, generator=g, dtype=dtype)).log_softmax(-1)
    token = torch.multinomial(q.exp(), 1, generator=g)
    behavior, proximal = (x.gather(1, token)[:, 0].float() for x in (q, p))
    mask = torch.ones(size, dtype=torch.bool)
    lengths = (LENGTH,) * SAMPLES
    return rollout(
        samples=SAMPLES, lengths=lengths, behavior=behavior, proximal=proximal, mask=mask, advantages=None
    )


def test_its_error_is_right():
    """200 runs: 95% intervals leave out about 5%, at places and in rollouts together."""
    zs = [mean.z for seed in range(200) for mean in mean_ratios(diagnosed([honest(seed)]))]
    outside = sum(abs(z) > 1.96 for z in zs) / len(zs)
    assert len(zs) >= 400 and 0.02 <= outside <= 0.08, outside
    assert max(zs) < 5


@pytest.mark.parametrize("distance", [0.1, 1.0, 3.0])
def test_no_honest_trainer_brings_the_mean_ratio_above_1(distance):
    assert not any(is_above_one(diagnosed([honest(seed, distance)])) for seed in range(20))
    assert not is_above_one(diagnosed(run(4)))


def test_log_probs_of_another_token_at_one_place_bring_it_above_1():
    def at_the_start(r):
        moved = torch.where(r.segments.within < 2, r.behavior.roll(7), r.behavior)
        return {"behavior": moved}

    assert is_above_one(diagnosed(edited(run(4), at_the_start)))
