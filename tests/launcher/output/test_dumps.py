"""Dumps have the keys, types and order of slime's own files (writers of 624b824)."""

from __future__ import annotations

import torch

from slime_ext.launcher.output import dumps
from slime_ext.launcher.rollout.sample import RolloutSample

# key sets of files that slime's own writers made
ROLLOUT_KEYS = set(
    """
    group_index index rollout_id prompt tokens multimodal_inputs multimodal_train_inputs
    multimodal_train_input_id apply_chat_template_kwargs response response_length label reward loss_mask
    weight_versions rollout_log_probs rollout_top_p_token_ids rollout_top_p_token_offsets
    rollout_routed_experts remove_sample teacher_log_probs status metadata generate_function_path
    custom_rm_path train_metadata session_id non_generation_time spec_info prefix_cache_info
    """.split()
)
TRAIN_TYPES = {
    "data_parallel_rank": int,
    "sample_index": int,
    "rollout_position": int,
    "tokens": torch.int64,
    "response_lengths": int,
    "rewards": float,
    "truncated": int,
    "loss_masks": torch.int32,
    "rollout_ids": int,
    "rollout_mask_sums": torch.float32,
    "rollout_log_probs": torch.float32,
    "total_lengths": int,
    "source_names": str,
    "log_probs": torch.float32,
    "kl": torch.float32,
    "advantages": torch.float32,
    "returns": torch.float32,
    "local_raw_reward": float,
}


def shard(positions: list[int]) -> dict:
    """slime's rollout_data of one data-parallel rank."""
    n = len(positions)
    per_token = ("rollout_log_probs", "log_probs", "kl", "advantages", "returns")
    return {
        "partition": positions,
        "sample_indices": [p + 100 for p in positions],
        "tokens": [[1, 2, 3, p] for p in positions],
        "loss_masks": [[1, 0]] * n,
        "rollout_mask_sums": [torch.tensor(1.0)] * n,
        **{key: [torch.zeros(2, dtype=torch.float64, requires_grad=True)] * n for key in per_token},
        **{key: [2] * n for key in ("response_lengths", "total_lengths", "truncated", "rollout_ids")},
        **{key: [0.5] * n for key in ("rewards", "local_raw_reward")},
        "source_names": ["x"] * n,
        **{key: [[0]] for key in ("micro_batch_indices", "num_microbatches", "global_batch_sizes")},
        "raw_reward": [0.5, 1.0],
    }


def test_a_rollout_dump_has_slimes_keys(tmp_path):
    template = str(tmp_path / "rollout_data" / "{rollout_id}.pt")
    path = dumps.save_rollout(template, 3, [RolloutSample(index=0, tokens=[1]), RolloutSample(index=1)])
    content = torch.load(path, weights_only=True)
    assert path.name == "3.pt"
    assert (set(content), content["rollout_id"]) == ({"rollout_id", "samples"}, 3)
    assert set(content["samples"][0]) >= ROLLOUT_KEYS
    assert [row["index"] for row in content["samples"]] == [0, 1]


def test_a_train_dump_has_slimes_keys_and_types(tmp_path):
    path = dumps.save_train(str(tmp_path / "{rollout_id}.pt"), 3, [shard([0])])
    content = torch.load(path, weights_only=True)
    assert set(content) == {"format_version", "rollout_id", "rank", "samples", "dp_shards", "raw_reward"}
    (row,) = content["samples"]
    kinds = {key: v.dtype if isinstance(v, torch.Tensor) else type(v) for key, v in row.items()}
    assert kinds == TRAIN_TYPES
    assert content["format_version"] == 2


def test_samples_of_all_ranks_follow_the_rollouts_order(tmp_path):
    path = dumps.save_train(str(tmp_path / "t.pt"), 3, [shard([1, 2]), shard([0, 3])])
    content = torch.load(path, weights_only=True)
    assert [s["rollout_position"] for s in content["samples"]] == [0, 1, 2, 3]
    assert [s["data_parallel_rank"] for s in content["samples"]] == [1, 0, 0, 1]
    assert [s["sample_index"] for s in content["samples"]] == [100, 101, 102, 103]
    assert [s["tokens"][-1].item() for s in content["samples"]] == [0, 1, 2, 3]
