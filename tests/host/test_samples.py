"""A sample is found by the identity of its loss mask, and by nothing else."""

from __future__ import annotations

import gc
import math

import pytest
import torch

from slime_ext.errors import NonFiniteError
from slime_ext.host import rollout_data as samples
from slime_ext.host.rollout_data import Record
from slime_ext.host.step_metrics import NonFiniteTracker
from slime_ext.ops.segments import Segments


def data(count=3, **more):
    return {"loss_masks": [torch.ones(4, dtype=torch.int32) for _ in range(count)], **more}


@pytest.fixture(autouse=True)
def clean():
    yield
    samples.remember_samples({"loss_masks": []})


def test_a_hook_call_finds_its_samples_in_any_order():
    rollout = data(sample_indices=[10, 11, 12])
    samples.remember_samples(rollout)
    found = samples.samples_of([rollout["loss_masks"][2], rollout["loss_masks"][0]])
    assert found == [(2, 12), (0, 10)]


def test_an_equal_mask_is_another_sample():
    rollout = data()
    samples.remember_samples(rollout)
    assert samples.samples_of([rollout["loss_masks"][0].clone()]) is None


def test_a_rollout_forgets_the_one_before():
    before, after = data(), data()
    samples.remember_samples(before)
    samples.remember_samples(after)
    assert samples.samples_of(before["loss_masks"]) is None
    assert samples.samples_of(after["loss_masks"]) is not None


def test_a_mask_that_is_gone_is_not_mistaken_for_one_at_its_address():
    rollout = data(1)
    samples.remember_samples(rollout)
    address = id(rollout["loss_masks"][0])
    rollout.clear()
    gc.collect()
    others = [torch.ones(4, dtype=torch.int32) for _ in range(64)]
    assert all(samples.samples_of([mask]) is None for mask in others), address in map(id, others)


def test_records_take_what_the_release_fills_in():
    for more, index in (({}, None), ({"sample_indices": torch.tensor([4])}, 4), ({"sample_indices": [7]}, 7)):
        rollout = data(1, **more)
        samples.remember_samples(rollout)
        (record,) = samples.samples_of(rollout["loss_masks"])
        assert record == (0, index)


@pytest.mark.parametrize(
    ("records", "name"),
    [
        ([Record(0, 6), Record(1, 7)], r"sample 7 \(sequence 1 of 2 in micro-batch 0\)"),
        ([Record(0), Record(1)], "sequence 1 of 2 in micro-batch 0"),
        (None, "sequence 1 of 2 in micro-batch 0"),
    ],
)
def test_a_broken_sample_is_named_by_its_index_where_the_host_keeps_one(records, name):
    poison = NonFiniteTracker()
    broken = torch.tensor([0.0, 0.0, math.nan])
    poison.look({"train_log_probs": broken}, Segments.whole([1, 2], torch.ones(3)), records)
    with pytest.raises(NonFiniteError, match=f"^train_log_probs, {name}, response token 1: "):
        poison.check([poison.vector().tolist()], 0)
