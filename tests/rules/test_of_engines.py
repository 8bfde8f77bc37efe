"""Launches that break each rule of this subject, and launches that keep it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_ext.rules.judge import RULES
from tests.rules.launches import ALONE, HOST, a_host, judged, setup_of

VARIABLE = "SGLANG_RETURN_ORIGINAL_LOGPROB"
ORIGINAL = {"environment": {VARIABLE: "1"}}
IDLE = {"repetition_penalty": 1.0, "frequency_penalty": 0, "presence_penalty": None, "logit_bias": {}}
SEEDED = {"sglang_enable_deterministic_inference": True}
GENERATE = {"custom_generate_function_path": "slime_ext.host.generate"}
CHECKPOINT = {"hf_checkpoint": str(Path(__file__).parent / "checkpoint")}


def preferred(**params):
    return {"sglang_preferred_sampling_params": json.dumps(params)}


# (rule, arguments, line): what the rule says of a launch with these arguments starts with the line; None
# where it says nothing. Arguments that are no flags: the function, what it is made ``of``, the keys of the
# file, the host's code. Neighbours differ in what the rule looks at.
CASES = [
    ("min_p_without_replay", preferred(min_p=0.1), "--sglang-preferred-sampling-params: expected no mi"),
    ("min_p_without_replay", preferred(min_p=0), None),
    ("min_p_without_replay", {}, None),
    ("min_p_without_replay", {**preferred(min_p=0.1), **ALONE}, None),
    ("min_p_beside_init", {**preferred(min_p=0.1), **ALONE}, "--sglang-preferred-sampling-params: expec"),
    ("min_p_beside_init", preferred(min_p=0.1), None),
    ("min_p_beside_init", ALONE, None),
    ("original_log_probs", {"rollout_temperature": 0.8, **ORIGINAL}, "SGLANG_RETURN_ORIGINAL_LOGPROB: expec"),
    ("original_log_probs", {"rollout_temperature": 1.0, **ORIGINAL}, None),
    ("original_log_probs", {"rollout_temperature": 0.8}, None),
    ("original_log_probs", {"rollout_temperature": None, **ORIGINAL}, None),
    ("original_log_probs", {"rollout_temperature": 0.8, **ORIGINAL, **ALONE}, None),
    ("original_log_probs_beside_init", {"rollout_temperature": 0.8, **ORIGINAL, **ALONE}, "SGLANG_RETUR"),
    ("original_log_probs_beside_init", {"rollout_temperature": 0.8, **ORIGINAL}, None),
    ("original_log_probs_beside_init", ALONE, None),
    ("original_log_probs", {"rollout_temperature": 0.8, "environment": {VARIABLE: "0"}}, None),
    ("greedy_sampling", {"rollout_top_k": 1}, "--rollout-top-k: expected -1, got 1: set --rollout-top-k -1,"),
    ("greedy_sampling_beside_init", {"rollout_temperature": 0.0, **ALONE}, "--rollout-temperature: expected"),
    ("greedy_sampling_beside_init", {"rollout_temperature": 0.0}, None),
    ("greedy_sampling_beside_init", ALONE, None),
    ("top_p_beside_init", {"rollout_top_p": 0.9, "host": a_host(replays_top_p=False), **ALONE}, "--rollout-"),
    ("top_p_beside_init", {"rollout_top_p": 0.9, "host": HOST, **ALONE}, None),
    ("top_p_beside_init", {"rollout_top_p": 0.9, "host": a_host(replays_top_p=False)}, None),
    ("top_k_beside_init", {"rollout_top_k": 50, **ALONE}, "--rollout-top-k: expected -1, or a host that rep"),
    ("top_k_beside_init", {"rollout_top_k": 50}, None),
    ("top_k_beside_init", {"rollout_top_k": 50, "use_sampling_support_replay": True, **ALONE}, None),
    ("unreadable_sampling_params", {"sglang_preferred_sampling_params": "min_p=0"}, "--sglang-preferred-sam"),
    ("unreadable_sampling_params", {"sglang_preferred_sampling_params": "[1]"}, "--sglang-preferred-samplin"),
    ("unreadable_sampling_params", {}, None),
    ("unreadable_sampling_params", preferred(min_p=0.1), None),
    ("penalties_in_record", preferred(repetition_penalty=1.1), "--sglang-preferred-sampling-params: exp"),
    ("penalties_in_record", preferred(frequency_penalty=0.2), "--sglang-preferred-sampling-params: expe"),
    ("penalties_in_record", preferred(presence_penalty=-1), "--sglang-preferred-sampling-params: expect"),
    ("penalties_in_record", preferred(logit_bias={'5': 2.0}), "--sglang-preferred-sampling-params: expe"),
    ("penalties_in_record", preferred(**IDLE), None),
    ("penalties_in_record", {}, None),
    ("penalties_in_record", preferred(repetition_penalty=1.1, presence_penalty=1), "--sglang-preferred-"),
    ("minimum_length_in_record", preferred(min_new_tokens=16), "--sglang-preferred-sampling-params: exp"),
    ("minimum_length_in_record", preferred(min_new_tokens=0), None),
    ("minimum_length_in_record", {}, None),
    ("grammar_in_record", preferred(json_schema='{}'), "--sglang-preferred-sampling-params: expected no"),
    ("grammar_in_record", preferred(regex='a+'), "--sglang-preferred-sampling-params: expected no re"),
    ("grammar_in_record", preferred(ebnf='root ::= x'), "--sglang-preferred-sampling-params: expected n"),
    ("grammar_in_record", preferred(structural_tag='t'), "--sglang-preferred-sampling-params: expected "),
    ("grammar_in_record", preferred(regex=None), None),
    ("grammar_in_record", {}, None),
    ("seed_without_effect", preferred(sampling_seed=3), "--sglang-preferred-sampling-params: sampling_s"),
    ("seed_without_effect", {**preferred(sampling_seed=3), **SEEDED}, None),
    ("seed_without_effect", {}, None),
    ("sampling_of_checkpoint", {**CHECKPOINT, "custom_generate_function_path": "my.generate"}, "generation_"),
    ("sampling_of_checkpoint", {**CHECKPOINT, "rollout_function_path": "my.rollout"}, "generation_config.js"),
    ("sampling_of_checkpoint", {**CHECKPOINT, **GENERATE}, None),
    ("sampling_of_checkpoint", CHECKPOINT, None),
    ("sampling_of_checkpoint", {"hf_checkpoint": "/none/model", "rollout_function_path": "my.rollout"}, None),
    ("greedy_sampling", {"rollout_temperature": 0.0}, "--rollout-temperature: expected a number above 0, go"),
    ("greedy_sampling", {"rollout_temperature": 0.1}, None),
    ("greedy_sampling", {"rollout_temperature": None}, None),
    ("greedy_sampling", {"rollout_temperature": 0.0, **ALONE}, None),
    ("top_p_without_replay", {"rollout_top_p": 0.9, "host": a_host(replays_top_p=False)},
     "--rollout-top-p: expected 1.0, or a host that replays what top-p leaves, got 0.9: remove the flag"),
    ("top_p_without_replay", {"rollout_top_p": 0.9, "host": HOST}, None),
    ("top_p_without_replay", {"rollout_top_p": 1.0, "host": a_host(replays_top_p=False)}, None),
    ("top_p_without_replay", {"rollout_top_p": 0.9, "use_sampling_support_replay": True}, None),
    ("top_p_without_replay", {"rollout_top_p": 0.9, "host": a_host(replays_top_p=False), **ALONE}, None),
    ("top_k_without_replay", {"rollout_top_k": 50}, "--rollout-top-k: expected -1, or a host that replays"),
    ("top_k_without_replay", {"rollout_top_k": -1}, None),
    ("top_k_without_replay", {"rollout_top_k": 50, "use_sampling_support_replay": True}, None),
    ("top_k_without_replay", {"rollout_top_k": 50, **ALONE}, None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "line"), CASES, ids=lambda value: str(value)[:40])
def test_a_rule_says_its_line_where_it_is_broken_and_nothing_where_it_is_kept(name, arguments, line):
    judged(name, arguments, line)


@pytest.mark.parametrize("text", ['{"temperature": 1.0, "eos_token_id": [1, 2]}', "[1]", "[1", ""])
def test_a_checkpoint_without_sampling_settings_is_no_matter(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    setup = setup_of(hf_checkpoint=str(tmp_path), custom_generate_function_path="my.generate")
    assert RULES["sampling_of_checkpoint"].judge(setup) is None


def test_a_value_of_the_checkpoint_is_not_shown():
    setup = setup_of(**CHECKPOINT, custom_generate_function_path="my.generate")
    line = RULES["sampling_of_checkpoint"].judge(setup)
    assert "temperature, top_p, top_k" in line and "0.6" not in line
