"""Advantages of known kinds, which are computed in plain Python."""

from __future__ import annotations

import math
import random

import pytest
import torch

from slime_ext.tools.analysis.detectors.shared.estimators import kind_of
from tests.tools.analysis.rollouts import rollout

SIZES = (2, 3, 9, 16, 5, 6)  # samples of each prompt


def prompts_of(seed):
    """The rewards of each prompt: the next one's are a tenth as far apart, the last one's are equal."""
    rng = random.Random(seed)
    apart = [[10.0**-i * rng.gauss(0, 1) for _ in range(size)] for i, size in enumerate(SIZES)]
    return [*apart, [0.5] * 4]


def minus_mean(rewards):
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def over_deviation(rewards):
    apart = minus_mean(rewards)
    deviation = math.sqrt(sum(x * x for x in apart) / len(apart))
    return [x / deviation if deviation else 0.0 for x in apart]


def kind(prompts, advantages):
    """What ``kind_of`` returns for one advantage per sample."""
    rewards = [reward for prompt in prompts for reward in prompt]
    found = rollout(
        samples=len(rewards),
        lengths=(3,) * len(rewards),
        behavior=-torch.ones(3 * len(rewards)),
        proximal=-torch.ones(3 * len(rewards)),
        mask=torch.ones(3 * len(rewards), dtype=torch.bool),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        groups=tuple(i for i, prompt in enumerate(prompts) for _ in prompt),
        advantages=torch.tensor(advantages).repeat_interleave(3),
    )
    return kind_of(found)


@pytest.mark.parametrize("estimate", [minus_mean, over_deviation])
@pytest.mark.parametrize("seed", range(3))
def test_advantages_of_a_prompt_may_be_divided_by_the_deviation_of_its_rewards(estimate, seed):
    prompts = prompts_of(seed)
    own = [advantage for prompt in prompts for advantage in estimate(prompt)]
    kinds = {
        "own": own,
        "flipped": [-x for x in own],
        "late": own[-1:] + own[:-1],
        "early": own[1:] + own[:1],
    }
    assert {name: kind(prompts, advantages) for name, advantages in kinds.items()} == {n: n for n in kinds}
