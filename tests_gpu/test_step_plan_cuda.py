"""The step plan on CUDA: settled there, it is the CPU's; a hook call with it waits for nothing."""

from __future__ import annotations

import pytest
import torch

from slime_ext import tis
from slime_ext.host import step_metrics
from tests.host import slime_rollouts as slime

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
MAPPING = {
    "steps": [
        "reweight",
        {"truncate": {"high": 1.1}},
        "normalize",
        {"second_moment": {"threshold": 0.02}},
        {"reject": {"low": 0.8, "high": 1.25}},
        {"reject": {"unit": "sequence", "aggregate": "mean", "low": 0.9, "high": 1.1}},
    ],
    "denominator": "kept",
    "group": "atomic",
}


def moved(value):
    if isinstance(value, torch.Tensor):
        return value.cuda()
    return [moved(x) for x in value] if isinstance(value, list) else value


def opened(args, data):
    """The first optimizer step with its plan, and its hook calls."""
    iterator, count = slime.DataIterator(data), data["num_microbatches"][0]
    step = slime.step_of(args, data, iterator, count)
    calls = [call_of(iterator.get_next((*slime.PER_SAMPLE, "host_loss"))) for _ in range(count)]
    return step_metrics.under_way(step), calls


def call_of(taken):
    host = torch.cat(taken.pop("host_loss"))
    return taken | {"train_log_probs": taken.pop("log_probs"), "pg_loss": host}


def test_losses_are_those_of_the_cpu():
    args = slime.arguments(MAPPING)
    found = []
    for place in (lambda data: data, lambda data: {key: moved(value) for key, value in data.items()}):
        step, calls = opened(args, place(slime.data_of(slime.samples(1))))
        with step:
            found.append(torch.cat([tis.correct(args, **call)[0].cpu() for call in calls]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-9)


def test_a_hook_call_with_a_plan_waits_for_nothing():
    args = slime.arguments(MAPPING)
    step, calls = opened(args, {k: moved(v) for k, v in slime.data_of(slime.samples(1)).items()})
    with step:
        tis.correct(args, **calls[0])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            tis.correct(args, **calls[1])
        finally:
            torch.cuda.set_sync_debug_mode("default")
