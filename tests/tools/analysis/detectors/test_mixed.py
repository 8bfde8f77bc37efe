"""Tokens that agree and tokens that are far off, mixed in every sample."""

import math
from dataclasses import replace

import pytest
import torch

from slime_ext.tools.analysis.detectors.shared.mixed import ENDS, UNSURE, Octaves
from tests.tools.analysis.detectors.toys import edited, findings, run


def drafted(scale, accepts=True):
    """Draws from the target; an accepted token has the log-prob of a draft whose logits are scaled."""

    def draw(logits, generator):
        target, draft = logits.log_softmax(1), (scale * logits).log_softmax(1)
        drawn = torch.multinomial(target.exp(), 1, generator=generator)
        p, q = (x.gather(1, drawn)[:, 0] for x in (target, draft))
        chance = (q - p).exp() if accepts else torch.ones_like(p)
        accepted = torch.rand(p.shape, generator=generator, dtype=p.dtype) < chance
        return drawn, torch.where(accepted, q, p)

    return draw


@pytest.mark.parametrize("scale", [0.4, 0.6, 1.8])
def test_accepted_tokens_with_the_log_prob_of_the_draft_are_named(scale):
    (finding,) = findings(run(draw=drafted(scale))).values()
    assert finding.name == "mixed_policies" and not finding.or_else
    assert finding.explains > 0.95 and "--speculative-algorithm" in finding.fix


def test_the_draft_at_every_token_is_no_mixture():
    assert "mixed_policies" not in findings(run(draw=drafted(0.6, accepts=False)))


def test_far_samples_are_no_mixture():
    """Half of the samples have other log-probs: the share differs from sample to sample."""

    def half(r):
        is_far = r.segments.ids % 2 == 0
        g = torch.Generator().manual_seed(r.rollout_id)
        noise = 0.5 * torch.randn(r.size, generator=g)
        return {"proximal": torch.where(is_far, r.proximal + noise - 0.125, r.proximal)}

    assert "mixed_policies" not in findings(edited(run(), half))


def test_first_tokens_that_agree_in_every_sample_are_no_mixture():
    """The share is the same in each sample, but not at each place."""

    def after_the_first(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        noise = 0.5 * torch.randn(r.size, generator=g) - 0.125
        return {"proximal": torch.where(r.segments.within < 12, r.behavior, r.proximal + noise)}

    assert "mixed_policies" not in findings(edited(run(), after_the_first))


def noisy(r):
    """A third of the tokens have noise whose mean ratio is 1, as other experts make it."""
    g = torch.Generator().manual_seed(r.rollout_id)
    is_far = torch.rand(r.size, generator=g) < 0.33
    noise = 0.5 * torch.randn(r.size, generator=g) - 0.125
    return {"proximal": torch.where(is_far, r.proximal + noise, r.proximal)}


@pytest.mark.parametrize(("experts", "other"), [(None, "routing_flips"), (False, "quantised")])
def test_honest_noise_at_some_tokens_leaves_the_cause_open(experts, other):
    flags = {} if experts is None else {"has_experts": experts}
    found = findings(edited(run(), noisy), **flags)
    assert found["mixed_policies"].or_else == (other,)


def test_sums_by_octave_are_those_of_plain_loops():
    (r,) = edited(run(1), noisy)
    measure, ends = Octaves(), [0.0, *ENDS, math.inf]
    measure.add(replace(r))
    columns = [[0.0] * 3 for _ in ends[1:]]
    at = 0
    for length in r.lengths:
        sizes = [abs(float(r.log_ratio[t])) for t in range(at, at + length) if float(r.behavior[t]) < UNSURE]
        at, until = at + length, 0
        for k, column in enumerate(columns):
            here = sum(ends[k] <= size < ends[k + 1] for size in sizes)
            until += here
            column[0] += here
            column[1] += until**2
            column[2] += len(sizes) * until
    assert measure.unsure.tolist() == columns
    assert float(measure.every[:, 0].sum()) == r.size
