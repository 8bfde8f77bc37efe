"""The sample under slime's names."""

from __future__ import annotations

from slime_ext.launcher.rollout.sample import RolloutSample

# Keys of a sample in a rollout dump, as written by slime's own Sample.to_dict at 624b824a8.
SLIME_KEYS = """group_index index rollout_id prompt tokens multimodal_inputs multimodal_train_inputs
multimodal_train_input_id apply_chat_template_kwargs response response_length label reward loss_mask
weight_versions rollout_log_probs rollout_top_p_token_ids rollout_top_p_token_offsets rollout_routed_experts
remove_sample teacher_log_probs status metadata generate_function_path custom_rm_path train_metadata
session_id non_generation_time spec_info prefix_cache_info""".split()


def sample():
    versions = {"weight_versions": ["1", "2"], "token_weight_versions": ["1", "2"]}
    per_token = {"loss_mask": [1, 1], "rollout_log_probs": [-0.5, -1.0], **versions}
    return RolloutSample(3, 7, 2, "ab", [5, 6, 7, 8], "cd", 2, "cd", 1.0, **per_token, cached_tokens=1)


def test_dump_has_slimes_keys_and_one_of_ours():
    assert set(sample().to_dict()) == {*SLIME_KEYS, "token_weight_versions"}


def test_a_dump_holds_what_the_sample_has():
    dumped = sample().to_dict()
    assert (dumped["group_index"], dumped["index"], dumped["rollout_id"]) == (3, 7, 2)
    assert dumped["rollout_log_probs"] == [-0.5, -1.0] and dumped["tokens"] == [5, 6, 7, 8]
    assert dumped["prefix_cache_info"] == {"cached_tokens": 1, "total_prompt_tokens": 2}


def test_prompt_and_response_share_the_tokens():
    assert (sample().prompt_length, sample().response_tokens) == (2, [7, 8])


def test_a_dropped_sample_trains_nothing_and_keeps_its_place():
    dropped = sample().drop("why")
    assert (dropped.index, dropped.dropped, dropped.remove_sample) == (7, "why", True)
    assert (dropped.loss_mask, dropped.rollout_log_probs) == ([0, 0], [-0.5, -1.0])


def test_a_dropped_sample_without_log_probs_gets_zeros():
    dropped = RolloutSample(tokens=[1, 2, 3], response_length=2, rollout_log_probs=[-1.0]).drop("why")
    assert dropped.rollout_log_probs == [0.0, 0.0]
    assert dropped.token_weight_versions == ["unknown", "unknown"]
