"""Sampling one rollout ahead, without an engine."""

from __future__ import annotations

from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor

import pytest

from slime_ext.launcher.sampler import Sampler


class Prompts:
    """A data set that counts the batches taken."""

    taken = 0

    def state_dict(self):
        return self.taken


def sampler_of(rollouts, train_async):
    """A sampler whose rollouts are their numbers."""
    sampler = object.__new__(Sampler)
    sampler.args = Namespace(train_async=train_async, num_rollout=rollouts)
    sampler.dataset, sampler.thread, sampler.ahead = Prompts(), ThreadPoolExecutor(1), None

    def sample(rollout_id):
        sampler.dataset.taken += 1
        return rollout_id

    sampler._sample = sample
    return sampler


@pytest.mark.parametrize("train_async", [False, True])
def test_rollouts_come_in_order_and_a_resumed_run_takes_the_prompts_of_the_next(train_async):
    sampler = sampler_of(3, train_async)
    for rollout_id in range(3):
        assert sampler.sample(rollout_id) == rollout_id
        sampler._wait_for_ahead()
        assert sampler.data_state == rollout_id + 1
        assert sampler.dataset.taken == min(rollout_id + 1 + train_async, 3)
