"""A soft cap of the logits on one side is told from a temperature by the logit on which it depends."""

from __future__ import annotations

import pytest
import torch

from slime_ext.tools.analysis.detectors.shared import bends
from tests.tools.analysis.detectors.toys import PROMPTS, Policy, diagnosed, edited, findings, run

CAP = 15.0


def capped(logits):
    return CAP * torch.tanh(logits / CAP)


def pair(side, seed=0):
    """A policy of the trainer and the engine's table: logits of one model, with and without its cap."""
    policy = Policy(seed, moves=0.0)
    raw = policy.table * 0.8 + 4
    engine, policy.table = {
        "engine lacks": (raw, capped(raw)),
        "engine caps": (capped(raw), raw),
        "trainer differs": (capped(raw), raw * torch.tanh(raw / CAP)),
        "temperature": (raw, raw / 1.4),
        "colder": (raw, raw * 1.4),
        "both": (capped(raw), capped(raw)),
    }[side]
    return policy, engine


def found(side, seed=0, **settings):
    policy, engine = pair(side, seed)
    return findings(run(6, policy=policy, sampler=engine, samples=128, **settings))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("side", "said"),
    [
        ("engine lacks", "the engine does not"),
        ("engine caps", "the trainer does not"),
        ("trainer differs", "another formula"),
    ],
)
def test_a_soft_cap_of_one_side_is_named_with_that_side(side, said, seed):
    named = found(side, seed)
    assert set(named) == {"soft_cap"} and said in named["soft_cap"].title
    assert named["soft_cap"].explains > 0.9


def test_a_few_log_probs_that_are_far_off_are_no_soft_cap():
    """A raced buffer: at one token in 25 the log-prob is that of another token, up to 100 nats off."""

    def raced(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        is_far = torch.rand(r.size, generator=g) < 0.04
        return {"behavior": torch.where(is_far, -20 * torch.rand(r.size, generator=g), r.behavior)}

    for seed in range(3):
        assert "soft_cap" not in findings(edited(run(6, policy=Policy(seed), samples=128), raced))


def test_two_temperatures_are_positive():
    """One context in twenty has another text before it, and the factor that fits its tokens is below 0."""
    g = torch.Generator().manual_seed(0)
    contexts = [(x, x + 1e-4 * torch.randn(3, generator=g)) for x in -torch.rand(20, 3, generator=g)]
    contexts[0] = contexts[0][0], -6 * contexts[0][0]
    fit = bends._fits(tuple((tuple(x.tolist()), tuple(y.tolist())) for x, y in contexts))
    assert fit.factor < 0 and not fit.is_mixed
    contexts[0] = contexts[0][0], 3 * contexts[0][0]
    fit = bends._fits(tuple((tuple(x.tolist()), tuple(y.tolist())) for x, y in contexts))
    assert fit.factor == pytest.approx(3, rel=1e-3) and fit.is_mixed


@pytest.mark.parametrize("side", ["temperature", "colder"])
def test_a_temperature_is_no_soft_cap(side):
    named = found(side)
    assert set(named) == {"temperature"} and not named["temperature"].or_else


def test_equal_caps_and_noise_are_no_soft_cap():
    assert found("both") == {}
    assert "soft_cap" not in found("both", noise=0.2)


def test_without_shared_texts_a_temperature_or_a_soft_cap_is_said():
    policy, engine = pair("temperature")
    lone = tuple(range(128))
    (finding,) = findings(run(6, policy=policy, sampler=engine, samples=128, groups=lone)).values()
    assert finding.name == "temperature" and "soft_cap" in finding.or_else


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("scale", [0.5, 1.6])
def test_a_temperature_of_some_prompts_is_no_soft_cap(scale, seed):
    """Every third prompt is sampled at another temperature, as in the batch of an evaluation."""
    policy = Policy(seed, moves=0.0)
    policy.table = policy.table * 0.8 + 4

    def warp(logits, seen, at):
        prompts = torch.arange(len(logits)) * PROMPTS // len(logits)
        return torch.where((prompts % 3 == 0)[:, None], logits / scale, logits)

    named = findings(run(6, policy=policy, samples=128, warp=warp))
    assert set(named) == {"temperature"} and named["temperature"].severity == "error"
    assert f"about {scale} times the trainer's temperature" in named["temperature"].evidence
    assert named["temperature"].explains > 0.9


def smoothed(rollouts, policy, weight):
    """The trainer's log-probs are (1 - w) log p + w mean log p."""
    means = policy.table.log_softmax(1).mean(1).float()

    def edit(r):
        is_first = r.segments.within == 0
        mean = torch.where(is_first, r.proximal.mean() - 4, means[r.tokens.roll(1)])
        return {"proximal": (1 - weight) * r.proximal + weight * mean}

    return edited(rollouts, edit)


def test_noise_of_bfloat16_hides_no_factor_that_is_known_well():
    """Noise is as large as what the factor changes, which is 5% of the differences."""
    policy = Policy(moves=0.0)
    noisy = run(6, policy=policy, samples=128, noise=0.01)
    assert bends.same_text_factor(diagnosed(noisy)) is None
    factor = bends.same_text_factor(diagnosed(smoothed(noisy, policy, 0.05)))
    assert factor == pytest.approx(0.95, abs=0.01)


def test_smoothed_labels_scale_what_renormalising_leaves_alone():
    """After the same text, differences of (1 - w) log p + w mean log p are 1 - w times those of log p."""
    policy, weight = Policy(moves=0.0), 0.1
    rollouts = run(6, policy=policy, samples=128, noise=0.0)
    assert bends.same_text_factor(diagnosed(rollouts)) is None
    planted = smoothed(rollouts, policy, weight)
    assert bends.same_text_factor(diagnosed(planted)) == pytest.approx(1 - weight, abs=1e-3)
    (finding,) = findings(planted).values()
    assert finding.name == "truncated_sampling" and "scaled_log_probs" in finding.or_else
    assert "0.9 times the sampler's" in finding.evidence

    (finding,) = findings(run(6, policy=policy, sampler=of_likeliest(policy, 12), samples=128)).values()
    assert finding.name == "truncated_sampling" and not finding.or_else


@pytest.mark.parametrize("weight", [0.15, 0.2])
def test_smoothed_labels_are_no_grammar_however_far_they_move(weight):
    """All tokens are far below 0, but a grammar leaves differences of log-probs after the same text alone."""
    policy = Policy(moves=0.0)
    policy.table = 3 * policy.table
    (finding,) = findings(smoothed(run(6, policy=policy, samples=128), policy, weight)).values()
    assert finding.name == "truncated_sampling" and finding.or_else == ("scaled_log_probs",)


def of_likeliest(policy, count):
    """A sampler's table with top-k."""
    return policy.table.masked_fill(policy.table < policy.table.topk(count).values[:, -1:], -torch.inf)


@pytest.mark.parametrize(("weight", "count"), [(0.01, 2), (0.02, 3), (0.04, 4)])
def test_smoothed_labels_take_the_most_where_the_sampler_is_sure_and_top_k_takes_the_least(weight, count):
    """No text comes twice here, so nothing tells by what differences are scaled."""
    policy = Policy(moves=0.0)
    policy.table = 3 * policy.table
    (finding,) = findings(smoothed(run(6, policy=policy, groups=None), policy, weight)).values()
    assert finding.name == "truncated_sampling" and finding.or_else == ("scaled_log_probs",)
    assert "where the sampler is sure" in finding.evidence

    found = findings(run(6, policy=policy, sampler=of_likeliest(policy, count), groups=None))
    assert set(found) == {"truncated_sampling"} and not found["truncated_sampling"].or_else
