"""Launches that break each rule of this subject, and launches that keep it."""

from __future__ import annotations

import pytest

from tests.rules.launches import ALONE, HOST, a_host, judged

# (rule, arguments, line): what the rule says of a launch with these arguments starts with the line; None
# where it says nothing. Arguments that are no flags: the function, what it is made ``of``, the keys of the
# file, the host's code. Neighbours differ in what the rule looks at.
CASES = [
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
