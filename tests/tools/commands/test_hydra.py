"""Hydra's overrides in scripts, as verl and SkyRL are really configured; what they add unseen is refused."""

from __future__ import annotations

import pytest
import yaml

from slime_ext import load_config
from tests.tools.commands.test_commands import run, written

SCRIPT = """#!/usr/bin/env bash
set -xeuo pipefail
rollout_is=token                 # level of the weights
rollout_rs="token_k1,seq_max_k2"
bounds="0.6_1.6,2.5"
LENGTH=$((1024 * 4))
python3 -m verl.trainer.main_ppo \\
    data.train_files="$HOME/data/train.parquet" \\
    algorithm.rollout_correction.rollout_is=${rollout_is} \\
    ++algorithm.rollout_correction.rollout_is_threshold=3 \\
    algorithm.rollout_correction.rollout_rs=\\'${rollout_rs}\\' \\
    algorithm.rollout_correction.rollout_rs_threshold=\\'${bounds}\\' \\
    algorithm.horizon=$LENGTH \\
    trainer.logger='["console"]' $@
"""
BLOCK = {
    "rollout_is": "token",
    "rollout_is_threshold": 3,
    "rollout_rs": "token_k1,seq_max_k2",
    "rollout_rs_threshold": "0.6_1.6,2.5",
}


def converted(capsys, system, path):
    status, out, err = run(capsys, "convert", "--from", system, path)
    assert (status, err) == (0, "")
    return yaml.safe_load(out)


def test_overrides_are_the_block(capsys, tmp_path):
    native = converted(capsys, "verl", written(tmp_path / "run.sh", SCRIPT))
    assert load_config(native["slime_ext"]) == load_config({"verl": BLOCK})


def test_overrides_of_skyrl_and_its_own_loss(capsys, tmp_path):
    key = "trainer.algorithm"
    text = f"CAP=4.0\npython -m a {key}.off_policy_correction.tis_ratio_type=sequence {key}.eps_clip_low=0.3 "
    text += (
        f'{key}.off_policy_correction.sequence_tis_ratio_clip_high=$CAP {key}.policy_loss_type="dual_clip"'
    )
    native = converted(capsys, "skyrl", written(tmp_path / "run.sh", text))
    assert native["slime_ext"]["steps"] == [{"reweight": {"level": "sequence"}}, {"truncate": {"high": 4.0}}]
    loss = f"python -m a {key}.policy_loss_type=rollout_is {key}.eps_clip_high=0.28"
    native = converted(capsys, "skyrl", written(tmp_path / "run.sh", loss))["slime_ext"]
    assert (native["numerator"], native["surrogate"]) == ("target", "reinforce")
    assert native["steps"][1] == {"zero_outside": {"unit": "token", "low": 0.8, "high": 1.28}}
    both = f"{loss} {key}.off_policy_correction.tis_ratio_type=token"
    status, _, err = run(capsys, "convert", "--from", "skyrl", written(tmp_path / "run.sh", both))
    assert status == 2 and "tis_ratio_type: expected null beside policy_loss_type: rollout_is" in err


def test_a_script_that_says_nothing_or_is_anothers_is_one_line(capsys, tmp_path):
    path = written(tmp_path / "run.sh", SCRIPT)
    for system, text, line in (
        ("skyrl", SCRIPT, "got none: it is a script of verl; use --from verl"),
        ("verl", "python3 -m a data.x=1", "got none: verl corrects nothing without"),
        ("verl", SCRIPT.replace("=token", "=$LEVEL"), "expected a value that the script itself says, got"),
        ("trll", SCRIPT, "--from: unknown system 'trll'; did you mean 'trl'? (known: verl, skyrl, firew"),
    ):
        status, _, err = run(capsys, "convert", "--from", system, written(path, text))
        assert status == 2 and line in err
    status, _, err = run(capsys, "check", written(path, SCRIPT))
    assert status == 1 and f"slime-ext convert --from verl {path}" in err


NAMED = "python3 -m recipe.mine.main --config-name mine algorithm.rollout_correction.rollout_is=sequence"
BYPASS = {"algorithm": {"rollout_correction": {"rollout_is": "token", "bypass_mode": True}}}
UNSEEN = {  # a script -> what it reads that is not seen
    NAMED: "expected overrides alone, got --config-name: convert the output of",
    NAMED.replace("name mine", "path=/far"): "got --config-path=/far",
    NAMED.replace("--config-name mine", "-cn=mine"): "got -cn=mine",
    "python3 -m a ~algorithm.rollout_correction.rollout_is": "expected values that are set, got ~algorithm",
}
DEFAULTS = {  # what a file's ``defaults`` add to it -> whether that can change its correction
    "_self_": False,
    "optional ppo_trainer": True,
    "ppo_trainer": True,
    "algorithm@algorithm.rollout_correction": {"algorithm@algorithm.rollout_correction": "ours"},
    "algorithm": {"algorithm": "ours"},
    "override /algorithm": {"override /algorithm": "ours"},
    "data": False,
    "algorithm, of which nothing is chosen": False,
}
ENTRIES = {
    "data": {"data@data": "legacy"},
    "algorithm, of which nothing is chosen": {"algorithm": None},
}


@pytest.mark.parametrize("text", UNSEEN)
def test_what_a_command_adds_unseen_is_refused(capsys, tmp_path, text):
    """Else another algorithm could be printed: with bypass_mode the behavior policy is the anchor."""
    status, out, err = run(capsys, "convert", "--from", "verl", written(tmp_path / "run.sh", text))
    assert (status, out) == (2, "") and UNSEEN[text] in err and err.count("\n") == 1


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_that_can_change_the_correction_are_refused(capsys, tmp_path, name):
    acts = DEFAULTS[name]
    entry = acts if isinstance(acts, dict) else ENTRIES.get(name, name)
    path = written(tmp_path / "c.yaml", {"defaults": [entry], **BYPASS})
    status, out, err = run(capsys, "convert", "--from", "verl", path)
    if acts:
        assert (status, out) == (2, "") and "by which Hydra prints all of it" in err
    else:
        assert (status, err) == (0, "") and load_config(yaml.safe_load(out)["slime_ext"])
