"""Launches that break each rule of this subject, and launches that keep it."""

from __future__ import annotations

import pytest

from slime_ext.rules.judge import RULES
from tests.rules.launches import AGES, CERTIFIED, HOST, INIT, STRAW, WATCHED, a_host, judged, setup_of

# (rule, arguments, line): what the rule says of a launch with these arguments starts with the line; None
# where it says nothing. Arguments that are no flags: the function, what it is made ``of``, the keys of the
# file, the host's code. Neighbours differ in what the rule looks at.
CASES = [
    ("asynchronous_rollouts", {"program": "train_async.py"}, "train_async.py samples while the trainer trai"),
    ("asynchronous_rollouts", {"rollout_function_path": "examples.fully_async.generate"}, "--rollout-functi"),
    ("asynchronous_rollouts", {"program": "train.py", "rollout_function_path": "my.rollout"}, None),
    ("missing_weight_versions", {"of": AGES, **INIT, "host": a_host(carries_versions=False)},
     "max_staleness: expected the samples' weight versions, got a slime that keeps them in its rollout mana"),
    ("missing_weight_versions", {"of": AGES, **INIT, "host": HOST}, None),
    ("missing_weight_versions", {"of": AGES, **INIT, "host": a_host(carries_versions=False),
     "custom_rollout_log_function_path": "slime_ext.host.log_rollout"}, None),
    ("missing_weight_versions", {"of": WATCHED, **INIT, "host": a_host(carries_versions=False)},
     "slime_ext.guards.staleness_mean: expected the samples' weight versions, got a slime that keeps them i"),
    ("missing_weight_versions", {"of": CERTIFIED, **INIT, "host": a_host(carries_versions=False)},
     "slime_ext.guards.certified: expected the samples' weight versions, got a slime that keeps them in it"),
    ("missing_weight_versions",
     {"of": AGES, **INIT, "host": a_host(carries_versions=False, accepts=lambda *_: False)},
     "max_staleness: expected the samples' weight versions, got a slime that keeps them and has no --custom"),
    ("missing_weight_versions", {"of": AGES, "host": a_host(carries_versions=False)}, None),
    ("missing_weight_versions", {**INIT, "host": a_host(carries_versions=False)}, None),
    ("ages_of_straw", STRAW, "--rollout-data-transport straw: the oldest samples come first"),
    ("ages_of_straw", STRAW | {"of": AGES}, None),
    ("ages_of_straw", STRAW | {"of": WATCHED}, None),
    ("ages_of_straw", {"rollout_data_transport": "nixl"}, None),
    ("ages_beside_kept_cache", {"of": AGES, "flush_cache_interval": 0}, "--flush-cache-interval: expected 1"),
    ("ages_beside_kept_cache", {"of": WATCHED, "flush_cache_interval": 2}, "--flush-cache-interval:"),
    ("ages_beside_kept_cache", {"flush_cache_interval": 2}, None),
    ("ages_beside_kept_cache", {"of": AGES, "flush_cache_interval": 1}, None),
    ("ages_beside_kept_cache", {"of": AGES, "flush_cache_interval": None}, None),
    ("ages_beside_kept_cache", {"of": AGES, "pause_generation_mode": "in_place"}, "--pause-generation-mode:"),
    ("ages_beside_kept_cache", {"of": AGES, "pause_generation_mode": "retract"}, None),
    ("ages_beside_kept_cache", {"pause_generation_mode": "in_place"}, None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "line"), CASES, ids=lambda value: str(value)[:40])
def test_a_rule_says_its_line_where_it_is_broken_and_nothing_where_it_is_kept(name, arguments, line):
    judged(name, arguments, line)


@pytest.mark.parametrize(
    ("host", "log", "says"),
    [
        (
            None,
            None,
            "add --custom-rollout-log-function-path slime_ext.host.log_rollout, because slime's trainer",
        ),
        (
            a_host(carries_versions=False),
            None,
            "add --custom-rollout-log-function-path slime_ext.host.log_rollo",
        ),
        (
            a_host(carries_versions=False),
            "slime_ext.host.log_rollout",
            "off_policy/staleness_mean measures the",
        ),
        (HOST, None, "off_policy/staleness_mean measures the lag"),
    ],
)
def test_an_asynchronous_launch_is_told_how_its_lag_is_measured(host, log, says):
    setup = setup_of(program="train_async.py", host=host, custom_rollout_log_function_path=log)
    assert f"beside numerics: {says}" in RULES["asynchronous_rollouts"].judge(setup)
