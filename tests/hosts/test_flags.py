"""Kinds of arguments, misspelt flags, and what slime derives from flags."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime_ext.errors import ConfigError
from slime_ext.hosts.flags import check_command_line, check_kinds, forbid_misspelt
from slime_ext.tools.check.setup import as_parsed

NUMBER, COUNT, SWITCH = "a number (YAML", "a whole number above 0", "true or false"


def test_an_argument_of_another_kind_is_refused():
    for dest, value, kind in (
        ("rollout_temperature", "1e-4", NUMBER),
        ("kl_coef", "0.0", NUMBER),
        ("tis_clip", 10**400, NUMBER),
        ("eps_clip", -(10**400), NUMBER),
        ("global_batch_size", "64", COUNT),
        ("use_score_centering", "no", SWITCH),
        ("normalize_advantages", "yes", SWITCH),
        ("use_opd", "false", SWITCH),
        ("custom_config_path", 5, "a path"),
        ("custom_config_path", ["a"], "a path"),
        ("custom_config_path", True, "a path"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_kinds(SimpleNamespace(**{dest: value}))
        assert str(caught.value).startswith(f"--{dest.replace('_', '-')}: expected {kind}")
        assert "\n" not in str(caught.value)


def test_a_misspelt_flag_of_ours_is_named():
    args = SimpleNamespace(use_tis=False, custom_tis_function_path=None, custom_agent_function_path=None)
    for words, right in (
        (["--custom-tis-funtion-path", "slime_ext.tis.correct"], "--custom-tis-function-path"),
        (["--custom_tis_function_path=slime_ext.tis.correct"], "--custom-tis-function-path"),
        (["--use-tsi"], "--use-tis"),
        (["--get-mismatch-metric-s"], "--get-mismatch-metrics"),
        (["\u2013use-tis"], "--use-tis"),  # a dash of a web page
        (["--use-ti"], "--use-tis"),  # Megatron's parser takes no abbreviation
        (["--custom-tis-function", "slime_ext.tis.correct"], "--custom-tis-function-path"),
        (["--custom-tis", "slime_ext.tis.correct"], "--custom-tis-function-path"),
        (["--custom-config", "c.yaml"], "--custom-config-path"),
        (["--get-mism"], "--get-mismatch-metrics"),
        (["--custom-megatron-init-pth", "slime_ext.host.init"], "--custom-megatron-init-path"),
    ):
        flag = words[0].partition("=")[0]
        with pytest.raises(ConfigError, match=f"^{flag}: expected {right}, got a flag that the host ignores"):
            check_command_line(["python", "train.py", "--lr", "1e-3", *words], args)


@pytest.mark.parametrize("name", ["--Use-TIS", "--use_tis", "--Use_tis"])
def test_a_flag_in_other_letters_is_named(name):
    with pytest.raises(ConfigError, match=f"^run.sh: expected --use-tis, got {name}: slime ignores"):
        forbid_misspelt("run.sh", name)


def test_flags_that_are_none_of_ours_misspelt():
    """The host's own, values, and flags of nobody."""
    args = SimpleNamespace(custom_agent_function_path=None, use_tis=True)
    words = "--custom-agent-function-path a.b -x custom_tis_functio --use-gin"
    check_command_line(["train.py", *words.split()], args)
    values = "--wandb-group use-tis --wandb-project tis-clip-low --save ./use-tis --wandb-group use-tis-1"
    check_command_line(["train.py", *values.split()], args)
    beginnings = "--custom --get-mis --rollout-data x --custom-config-file x"
    check_command_line(["train.py", *beginnings.split()], args)
    lacking = "--custom-rollout-log-function-path slime_ext.host.log_rollout"  # slime before v0.2.2
    check_command_line(["train.py", *lacking.split()], args)


def test_what_slime_derives_from_other_flags():
    for flags, unknown, name, value in (
        ({"eps_clip": 0.3}, (), "eps_clip_high", 0.3),
        ({"eps_clip": 0.3, "eps_clip_high": 0.4}, (), "eps_clip_high", 0.4),
        ({}, ("eps_clip",), "eps_clip_high", None),
        ({"advantage_estimator": "ppo"}, (), "use_critic", True),
        ({"use_rollout_routing_replay": True}, (), "use_routing_replay", True),
    ):
        assert as_parsed(flags, unknown).get(name) == value, (flags, name)
