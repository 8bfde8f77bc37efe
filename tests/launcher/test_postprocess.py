"""What a user's postprocess function is given, and what it gives back."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from slime_ext.errors import DataError
from slime_ext.launcher.megatron.batching import Layout, pack_micro_batch
from slime_ext.launcher.postprocess import postprocess, take_back
from tests.launcher.megatron.tiny_rollout import rollout


def batches_and_data():
    samples = rollout(8)
    batches = [pack_micro_batch(part, Layout()) for part in (samples[:3], samples[3:])]
    keys = ("loss_masks", "rollout_log_probs", "advantages")
    data = {key: [x for b in batches for x in getattr(b, key)] for key in keys}
    proximal = {s.position: torch.zeros(s.response_length) for s in samples}
    return batches, proximal, {**data, "log_probs": list(proximal.values())}


def test_what_a_postprocess_function_replaces_is_trained_on():
    batches, proximal, data = batches_and_data()
    data["advantages"] = [torch.full_like(a, 7.0) for a in data["advantages"]]
    data["loss_masks"][4] = torch.zeros_like(data["loss_masks"][4])
    data["log_probs"][2] = data["log_probs"][2] - 1
    take_back(batches, proximal, data)
    assert all(bool((a == 7).all()) for batch in batches for a in batch.advantages)
    assert not batches[1].loss_masks[1].any() and batches[0].loss_masks[0].any()
    assert bool((proximal[2] == -1).all()) and not proximal[3].any()


@pytest.mark.parametrize("value", [None, 0.5, torch.zeros(99)])
def test_another_shape_is_named(value):
    batches, proximal, data = batches_and_data()
    data["advantages"][5] = value
    with pytest.raises(DataError, match=r"advantages\[5\]: expected a tensor of shape"):
        take_back(batches, proximal, data)


def double(args, rollout_id, data):
    assert rollout_id == 7 and data["sample_indices"] == [0, 1, 2, 3]
    data["advantages"] = [2 * x for x in data["advantages"]]


@pytest.mark.parametrize("path", ["tests.launcher.test_postprocess.double", None])
def test_the_function_that_the_flag_names_is_called_with_the_rollout(path):
    batch = pack_micro_batch(rollout(4), Layout())
    before = [x.clone() for x in batch.advantages]
    postprocess(Namespace(rollout_data_postprocess_path=path), 7, [[[batch]]], {})
    factor = 2 if path else 1
    assert all(torch.equal(x, factor * y) for x, y in zip(batch.advantages, before, strict=True))
