"""Kinds of arguments and the bands of the functions with a formula of their own."""

from __future__ import annotations

import ast
import inspect
import math
import re
from types import SimpleNamespace

import pytest

from slime_ext.config import rules as config_rules
from slime_ext.errors import ConfigError
from slime_ext.host import flags as host_flags
from slime_ext.host.flags import (
    ARGUMENTS,
    HOOK,
    check_command_line,
    check_flags,
)
from slime_ext.tools.commands.arguments import as_parsed

VANILLA, ICEPOP, OFF_POLICY = (
    {"use_tis": True, "custom_tis_function_path": f"slime_ext.tis.{name}_function"}
    for name in ("vanilla_tis", "icepop", "off_policy_is")
)
NUMBER, COUNT, SWITCH = "a number (YAML", "a whole number above 0", "true or false"


def test_an_argument_of_another_kind_is_refused():
    for dest, value, kind in (
        ("rollout_temperature", "1e-4", NUMBER),
        ("kl_coef", "0.0", NUMBER),
        ("kl_loss_coef", "1e-3", NUMBER),
        ("tis_clip", 10**400, NUMBER),
        ("eps_clip", -(10**400), NUMBER),
        ("over_sampling_batch_size", "64", COUNT),
        ("use_dynamic_batch_size", "no", SWITCH),
        ("normalize_advantages", "yes", SWITCH),
        ("use_opd", "false", SWITCH),
        ("custom_config_path", 5, "a path"),
        ("custom_config_path", ["a"], "a path"),
        ("custom_config_path", True, "a path"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_flags(SimpleNamespace(**{dest: value}))
        assert str(caught.value).startswith(f"--{dest.replace('_', '-')}: expected {kind}")
        assert "\n" not in str(caught.value)


def test_a_band_that_could_not_work_is_refused():
    for function, band, line in (
        (VANILLA, {"tis_clip": 0}, "--tis-clip: expected at least 1, got 0: on-policy tokens must keep"),
        (VANILLA, {"tis_clip": -1, "tis_clip_low": None}, "--tis-clip: expected at least 1, got -1"),
        (
            VANILLA,
            {"tis_clip_low": 3.0, "tis_clip": 2.0},
            "--tis-clip: expected more than --tis-clip-low 3.0",
        ),
        (
            VANILLA,
            {"tis_clip_low": 1, "tis_clip": 1},
            "--tis-clip: expected more than --tis-clip-low 1, got 1",
        ),
        (ICEPOP, {"tis_clip_low": 1.5, "tis_clip": 2.0}, "--tis-clip-low: expected at most 1, got 1.5"),
        (ICEPOP, {"tis_clip_low": 0.5, "tis_clip": 0.9}, "--tis-clip: expected at least 1, got 0.9"),
        (OFF_POLICY, {"eps_clip": -1}, "--eps-clip: expected at least 0, got -1"),
        (
            OFF_POLICY,
            {"eps_clip": 0.2, "eps_clip_high": -0.5},
            "--eps-clip-high: expected at least 0, got -0.5",
        ),
        (
            OFF_POLICY,
            {"eps_clip": 0.0},
            "--eps-clip: expected a number above 0, got 0.0: every weight would be",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            check_flags(SimpleNamespace(**function, **band))
        assert str(caught.value).startswith(line)


def test_a_band_around_1_is_let_through():
    for function, band in (
        (VANILLA, {}),
        (VANILLA, {"tis_clip": 2.0, "tis_clip_low": 0}),
        (VANILLA, {"tis_clip": math.inf, "tis_clip_low": 1}),
        (VANILLA, {"tis_clip": 1, "tis_clip_low": None}),
        (ICEPOP, {"tis_clip": 5, "tis_clip_low": 0.5}),
        (OFF_POLICY, {"eps_clip": 0.2, "eps_clip_high": None}),
        (OFF_POLICY, {"eps_clip": 1.0, "eps_clip_high": 4.0}),
        (OFF_POLICY, {"eps_clip": 0, "eps_clip_high": 0.2}),
        ({"use_tis": True, "custom_tis_function_path": "slime_ext.tis.token_tis"}, {"tis_clip": 0}),
        ({}, {"tis_clip": 0.5, "eps_clip": -1}),
    ):
        check_flags(SimpleNamespace(**function, **band))


def test_a_misspelt_flag_of_ours_is_named():
    args = SimpleNamespace(use_tis=False, custom_tis_function_path=None, custom_agent_function_path=None)
    for words, right in (
        (["--custom-tis-funtion-path", "slime_ext.tis.correct"], "--custom-tis-function-path"),
        (["--custom_tis_function_path=slime_ext.tis.correct"], "--custom-tis-function-path"),
        (["--use-tsi"], "--use-tis"),
        (["--get-mismatch-metric-s"], "--get-mismatch-metrics"),
        (["--custom-megatron-init-pth", "slime_ext.host.init"], "--custom-megatron-init-path"),
    ):
        flag = words[0].partition("=")[0]
        with pytest.raises(ConfigError, match=f"^{flag}: expected {right}, got a flag that the host ignores"):
            check_command_line(["python", "train.py", "--lr", "1e-3", *words], args)


def test_flags_that_are_none_of_ours_misspelt():
    """The host's own, what argparse takes for ours, values, and flags of nobody."""
    args = SimpleNamespace(custom_agent_function_path=None, use_tis=True)
    words = "--custom-agent-function-path a.b --use-ti --custom-tis-function -x custom_tis_functio --use-gin"
    check_command_line(["train.py", *words.split()], args)


def names_read(source):
    """Names of arguments that rules read: a.name, getattr(args, "name") and {a.name}."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "a":
            yield node.attr
        if isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            of_args = isinstance(node.args[0], ast.Name) and node.args[0].id in ("args", "a")
            yield from [node.args[1].value] if of_args and node.func.id == "getattr" else []
    yield from re.findall(r"\{a\.(\w+)\}", source)


def test_the_list_has_every_name_that_a_rule_reads():
    source = inspect.getsource(host_flags) + inspect.getsource(config_rules)
    read = {*names_read(source), "eps_clip", "eps_clip_high"}
    assert len(read) > 40 and read <= ARGUMENTS.keys()
    assert "unlisted" in names_read("{'': lambda a: a.unlisted}")


def test_a_rule_that_reads_a_name_outside_the_list_fails():
    with pytest.raises(KeyError, match="ARGUMENTS: expected unlisted, which a rule reads, got none: add it"):
        check_flags(SimpleNamespace(), {"never": lambda a: a.use_tis or a.unlisted})


def test_a_rule_that_reads_what_is_not_known_is_left_out():
    args = SimpleNamespace(use_tis=True, use_rollout_logprobs=True)
    with pytest.raises(ConfigError, match="--use-rollout-logprobs: cannot be combined with --use-tis"):
        check_flags(args, HOOK)
    check_flags(args, HOOK, unknown={"use_rollout_logprobs", "custom_tis_function_path"})


def test_what_slime_derives_from_other_flags():
    for flags, unknown, name, value in (
        ({"eps_clip": 0.3}, (), "eps_clip_high", 0.3),
        ({"eps_clip": 0.3, "eps_clip_high": 0.4}, (), "eps_clip_high", 0.4),
        ({}, ("eps_clip",), "eps_clip_high", None),
        ({"advantage_estimator": "ppo"}, (), "use_critic", True),
        ({"n_samples_per_prompt": 8}, (), "grpo_std_normalization", True),
        ({}, (), "grpo_std_normalization", False),
        ({"rollout_batch_size": 32}, (), "over_sampling_batch_size", 32),
        ({"use_rollout_routing_replay": True}, (), "use_routing_replay", True),
        ({"load_debug_rollout_data": "x"}, (), "debug_train_only", True),
        ({"dump_details": "/d"}, (), "save_debug_train_data", "/d/train_data/{rollout_id}.pt"),
        (
            {"rollout_batch_size": 32, "n_samples_per_prompt": 8, "num_steps_per_rollout": 4},
            (),
            "global_batch_size",
            64,
        ),
        ({"num_steps_per_rollout": 4}, ("rollout_batch_size",), "global_batch_size", None),
        ({"eval_interval": 5, "eval_prompt_data": "x"}, (), "eval_datasets", ["eval_prompt_data"]),
    ):
        assert as_parsed(flags, unknown).get(name) == value, (flags, name)
