"""The train dump of a rollout, as slime's readers get it."""

from __future__ import annotations

import math
from argparse import Namespace

import torch
import torch.distributed as dist

from slime_ext.launcher import train_dump
from slime_ext.launcher.megatron.batching import Layout, pack_micro_batch
from slime_ext.launcher.training_data import TrainSample

ARGS = Namespace(
    data_parallel_size=2, global_batch_size=4, ppo_n_minibatches=1,
    micro_batch_size=1, prompt_data="prompts",
)  # fmt: skip


def dumped(tmp_path, monkeypatch, samples, batch=None, **changes):
    log_probs = {s.position: torch.full((s.response_length,), -float(s.position)) for s in samples}
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(train_dump, "gather_whole", lambda batch, local: local)
    args = Namespace(**vars(ARGS) | changes, save_debug_train_data=str(tmp_path / "{rollout_id}.pt"))
    steps = [[[batch or pack_micro_batch(samples, Layout())]]]
    train_dump.train_dump(args, 3, samples, log_probs, steps)()
    return torch.load(tmp_path / "3.pt", weights_only=True)


def test_samples_stand_in_the_order_of_the_rollout_whoever_trained_them(tmp_path, monkeypatch):
    samples = [
        TrainSample(i, i, [7, 8, i], 1, [1], [-0.5], advantage=float(i), index=10 + i) for i in range(8)
    ]
    found = dumped(tmp_path, monkeypatch, samples)
    assert [s["sample_index"] for s in found["samples"]] == list(range(10, 18))
    assert [s["data_parallel_rank"] for s in found["samples"]] == [0, 1] * 4
    assert [float(s["log_probs"]) for s in found["samples"]] == [-i for i in range(8)]
    assert [shard["num_microbatches"] for shard in found["dp_shards"]] == [[2, 2]] * 2
    assert [shard["sample_indices"] for shard in found["dp_shards"]] == [[10, 12, 14, 16], [11, 13, 15, 17]]
    assert found["dp_shards"][1]["micro_batch_indices"] == [[0], [1], [2], [3]]


def test_a_sample_is_dumped_as_it_was_trained_on(tmp_path, monkeypatch):
    """With what a postprocess function replaced."""
    samples = [TrainSample(i, i, [7, i, 5, 6], 3, [1, 0, 1], [-0.5] * 3, advantage=1.0) for i in range(4)]
    batch = pack_micro_batch(samples, Layout())
    batch.advantages[2], batch.loss_masks[1] = torch.tensor([7.0, 8.0, 9.0]), torch.tensor([0, 0, 1])
    batch.rollout_log_probs[3] = torch.tensor([-1.0, -2.0, -3.0])
    found = dumped(tmp_path, monkeypatch, samples, batch, data_parallel_size=1)["samples"]
    assert found[2]["advantages"].tolist() == found[2]["returns"].tolist() == [7.0, 8.0, 9.0]
    assert found[1]["loss_masks"].tolist() == [0, 0, 1]
    assert found[3]["rollout_log_probs"].tolist() == [-1.0, -2.0, -3.0]
    assert found[0]["advantages"].tolist() == [1.0] * 3 and found[0]["loss_masks"].tolist() == [1, 0, 1]


def test_rewards_are_those_before_whitening_and_a_dropped_sample_has_none(tmp_path, monkeypatch):
    samples = [
        TrainSample(i, i, [7, i], 1, [1], [-0.5], advantage=9.0, reward=0.5, raw_reward=1.0) for i in range(4)
    ]
    samples[2].reward = samples[2].raw_reward = math.nan
    found = dumped(tmp_path, monkeypatch, samples)
    assert [s["rewards"] for s in found["samples"] if s["rollout_position"] != 2] == [0.5] * 3
    assert [float(s["advantages"]) for s in found["samples"]] == [9.0] * 4
    assert [math.isnan(r) for r in found["raw_reward"]] == [False, False, True, False]
