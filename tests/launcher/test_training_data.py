"""Advantages and denominators against loops written from the definitions."""

from __future__ import annotations

import math
import statistics
from argparse import Namespace

import pytest

from slime_ext.launcher.rollout.sample import RolloutSample
from slime_ext.launcher.training_data import group_advantages, train_samples, whiten


def sample(reward, mask, rollout_id=None, **more):
    n = len(mask)
    tokens = [5, 6, *range(n)]
    return RolloutSample(
        tokens=tokens,
        response_length=n,
        reward=reward,
        loss_mask=mask,
        rollout_id=rollout_id,
        rollout_log_probs=[-1.0] * n,
        **more,
    )


def arguments(**more):
    defaults = {
        "n_samples_per_prompt": 2,
        "rewards_normalization": True,
        "grpo_std_normalization": True,
        "normalize_advantages": False,
    }
    return Namespace(**{**defaults, **more})


def test_group_advantages_equal_the_definition():
    rewards = [0.0, 1.0, 0.5, 0.25, 0.25, 0.25]
    std = math.sqrt(((0 - 0.5) ** 2 + (1 - 0.5) ** 2 + 0) / 2)
    expected = [-0.5 / (std + 1e-6), 0.5 / (std + 1e-6), 0.0, 0.0, 0.0, 0.0]
    assert group_advantages(rewards, 3) == pytest.approx(expected, abs=1e-12)


def test_a_dropped_sample_neither_counts_nor_gets_an_advantage():
    with_gap = group_advantages([0.0, None, 1.0, 3.0], 4)
    without = group_advantages([0.0, 1.0, 3.0], 3)
    assert [with_gap[0], with_gap[2], with_gap[3]] == without
    assert with_gap[1] == 0.0


@pytest.mark.parametrize("rewards", [[None, None], [0.7, None], [0.7, 0.7]])
def test_a_group_without_a_difference_teaches_nothing(rewards):
    assert group_advantages(rewards, 2) == [0.0, 0.0]


def test_rewards_as_they_are():
    assert group_advantages([0.5, None, 2.0], 3, normalize=False) == [0.5, 0.0, 2.0]


def test_whitened_advantages_have_mean_zero_and_unbiased_variance_one_over_tokens():
    tokens = [3.0] + [-1.0] * 5 + [0.5] * 3
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    expected = [(a - mean) / math.sqrt(variance + 1e-8) for a in (3.0, -1.0, 0.5)]
    assert whiten([3.0, -1.0, 0.5], [1, 5, 3]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("counts", [[1, 0], [4, 4]])
def test_equal_advantages_are_whitened_to_zero(counts):
    assert whiten([0.5, 0.5], counts) == [0.0, 0.0]


def test_a_removed_sample_has_no_part_in_whitening():
    rows = [sample(r, [1, 1]) for r in (0.0, 1.0, 3.0)]
    removed = sample(None, [1, 1], remove_sample=True)
    chosen = arguments(n_samples_per_prompt=1, rewards_normalization=False, normalize_advantages=True)
    alone, beside = train_samples(chosen, rows), train_samples(chosen, [*rows, removed])
    assert [s.advantage for s in beside[:3]] == [s.advantage for s in alone]


def test_siblings_of_a_rollout_share_their_denominator():
    rows = [sample(0.0, [1, 1], 4), sample(1.0, [1, 0, 1], 4), sample(0.0, [1], 5), sample(0.0, [0], 6)]
    assert [s.mask_sum for s in train_samples(arguments(), rows)] == [4.0, 4.0, 1.0, 0.0]


def test_a_removed_sample_is_masked_out():
    rows = [sample(1.0, [1, 1], 0), sample(None, [1, 1], 1, remove_sample=True)]
    out = train_samples(arguments(), rows)
    assert out[1].loss_mask == [0, 0] and out[1].mask_sum == 0.0 and out[1].advantage == 0.0


def test_token_versions_become_numbers():
    row = sample(1.0, [1, 1, 1], 0, token_weight_versions=["4", "4", "8"])
    assert train_samples(arguments(n_samples_per_prompt=1), [row])[0].versions == [4, 4, 8]


def test_rewards_are_kept_as_given_and_before_whitening():
    rows = [sample(0.0, [1], 4), sample(1.0, [1, 1], 5), sample(None, [1], 6, remove_sample=True)]
    given = {"n_samples_per_prompt": 3, "grpo_std_normalization": False, "normalize_advantages": True}
    out = train_samples(arguments(**given), rows)
    assert [s.relative_reward for s in out[:2]] == [-0.5, 0.5] and [s.raw_reward for s in out[:2]] == [
        0.0,
        1.0,
    ]
    assert math.isnan(out[2].relative_reward) and out[0].advantage != out[0].relative_reward
