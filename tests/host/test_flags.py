"""Kinds of arguments and the bands of the functions with a formula of their own."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from slime_ext.errors import ConfigError
from slime_ext.host.flags import check_command_line, check_flags

VANILLA, ICEPOP, OFF_POLICY = (
    {"use_tis": True, "custom_tis_function_path": f"slime_ext.tis.{name}_function"}
    for name in ("vanilla_tis", "icepop", "off_policy_is")
)
NUMBER, COUNT, SWITCH = "a number (YAML", "a whole number above 0", "true or false"


@pytest.mark.parametrize(
    ("dest", "value", "kind"),
    [
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
    ],
    ids=lambda value: str(value)[:20],
)
def test_an_argument_of_another_kind_is_refused(dest, value, kind):
    with pytest.raises(ConfigError) as caught:
        check_flags(SimpleNamespace(**{dest: value}))
    assert str(caught.value).startswith(f"--{dest.replace('_', '-')}: expected {kind}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("function", "band", "line"),
    [
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
    ],
)
def test_a_band_that_could_not_work_is_refused(function, band, line):
    with pytest.raises(ConfigError) as caught:
        check_flags(SimpleNamespace(**function, **band))
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize(
    ("function", "band"),
    [
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
    ],
)
def test_a_band_around_1_is_let_through(function, band):
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
