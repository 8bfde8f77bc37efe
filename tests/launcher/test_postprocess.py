"""What a user's postprocess function is given, and what it gives back."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from slime_ext.errors import DataError
from slime_ext.launcher.megatron.batching import Layout, pack_micro_batch
from slime_ext.launcher.postprocess import postprocess, rollout_data, take_back
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
    samples = rollout(4)
    batch = pack_micro_batch(samples, Layout())
    before = [x.clone() for x in batch.advantages]
    args = Namespace(rollout_data_postprocess_path=path, global_batch_size=4)
    postprocess(args, 7, [[[batch]]], {}, samples)
    factor = 2 if path else 1
    assert all(torch.equal(x, factor * y) for x, y in zip(batch.advantages, before, strict=True))


# What slime's trainer holds at this point (its ray/rollout.py, actor.py and loss.py), but for multimodal
# inputs, replays, the reference and the teacher, which the launcher does not have.
KEYS = """advantages global_batch_sizes local_raw_reward log_probs loss_masks micro_batch_indices
num_microbatches partition raw_reward response_lengths returns rewards rollout_ids rollout_log_probs
rollout_mask_sums sample_indices tokens total_lengths truncated weight_versions""".split()


def test_the_data_has_slimes_keys_and_schedule():
    samples = rollout(8)
    first, second, third = (pack_micro_batch(samples[i:j], Layout()) for i, j in ((0, 3), (3, 4), (4, 8)))
    proximal = {s.position: torch.zeros(s.response_length) for s in samples}
    args = Namespace(global_batch_size=4)
    data = rollout_data(args, [[[first], [second]], [[third]]], proximal, samples)
    assert sorted(data) == KEYS
    assert data["micro_batch_indices"] == [[0, 1, 2], [3], [4, 5, 6, 7]]
    assert data["num_microbatches"] == [2, 1] and data["global_batch_sizes"] == [4, 4]
    assert data["loss_masks"][3] is second.loss_masks[0]
    assert data["rollout_mask_sums"].tolist() == [s.mask_sum for s in samples]
    per_sample = set(KEYS) - {"micro_batch_indices", "num_microbatches", "global_batch_sizes"}
    assert all(len(data[key]) == 8 for key in per_sample)


def test_a_stage_without_log_probs_says_so_by_their_absence():
    samples = rollout(2)
    data = rollout_data(
        Namespace(global_batch_size=2), [[[pack_micro_batch(samples, Layout())]]], {}, samples
    )
    assert "log_probs" not in data
