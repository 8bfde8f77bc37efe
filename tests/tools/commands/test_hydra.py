"""Hydra's overrides in scripts and ``defaults`` in files, as verl and SkyRL are really configured."""

from __future__ import annotations

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


def test_defaults_are_composed_below_the_file_that_names_them(capsys, tmp_path):
    (tmp_path / "algorithm").mkdir()
    written(tmp_path / "algorithm/rollout_correction.yaml", BLOCK)
    defaults = [
        {"algorithm@algorithm.rollout_correction": "rollout_correction"},
        {"data@data": "gone"},
        "_self_",
    ]
    base = {"defaults": defaults, "algorithm": {"gamma": 1.0}}
    native = converted(capsys, "verl", written(tmp_path / "base.yaml", base))
    assert load_config(native["slime_ext"]) == load_config({"verl": BLOCK})
    over = {"defaults": ["base", "_self_"], "algorithm": {"rollout_correction": {"rollout_is": "sequence"}}}
    native = converted(capsys, "verl", written(tmp_path / "mine.yaml", over))
    assert load_config(native["slime_ext"]) == load_config({"verl": {**BLOCK, "rollout_is": "sequence"}})
    status, _, err = run(
        capsys, "convert", "--from", "verl", written(tmp_path / "a.yaml", {"defaults": ["a"]})
    )
    assert status == 2 and "expected files that end, got 5 that name one another" in err


BYPASS = {"algorithm": {"rollout_correction": {"rollout_is": "token", "bypass_mode": True}}}
NAMED = "python3 -m recipe.mine.main --config-name mine algorithm.rollout_correction.rollout_is=sequence"


def test_the_file_that_a_script_names_is_below_its_overrides(capsys, tmp_path):
    """Without it another algorithm would be printed: with bypass_mode the behavior policy is the anchor."""
    (tmp_path / "recipe/mine/config").mkdir(parents=True)
    whole = {**BYPASS["algorithm"]["rollout_correction"], "rollout_is": "sequence"}
    for file, text in {
        "recipe/mine/config/mine.yaml": NAMED,
        "recipe/mine/there.yaml": NAMED.replace(
            "--config-name mine", "--config-path=. --config-name='there'"
        ),
        "beside.yaml": NAMED.replace("--config-name mine", "--config-name=beside"),
    }.items():
        written(tmp_path / file, BYPASS)
        script = tmp_path / ("run.sh" if file == "beside.yaml" else "recipe/mine/run.sh")
        native = converted(capsys, "verl", written(script, text))
        assert load_config(native["slime_ext"]) == load_config({"verl": whole}), file


def test_a_file_that_is_not_seen_is_said_and_nothing_is_converted(capsys, tmp_path):
    for text, line in {
        NAMED: "--config-name mine: expected a file beside the script, got none: what it sets is not seen",
        NAMED.replace(
            "--config-name mine", "--config-path /far"
        ): "--config-path /far: expected a file beside",
        "python3 -m a --config-name mine data.x=1": "--config-name mine: expected a file beside the script",
        "python3 -m a ~algorithm.rollout_correction.rollout_is": "got one taken away",
    }.items():
        status, out, err = run(capsys, "convert", "--from", "verl", written(tmp_path / "run.sh", text))
        assert (status, out) == (2, "") and line in err and err.count("\n") == 1, text
    for entry in ("ppo_trainer", {"algorithm@algorithm": "ours"}):
        path = written(tmp_path / "c.yaml", {"defaults": [entry, "_self_"], **BYPASS})
        status, out, err = run(capsys, "convert", "--from", "verl", path)
        assert (status, out) == (2, "") and "yaml beside it, got none: what it sets is not seen" in err
    path = written(tmp_path / "c.yaml", {"defaults": ["optional ppo_trainer", "_self_"], **BYPASS})
    assert run(capsys, "convert", "--from", "verl", path)[0] == 0


def test_a_search_path_is_followed(capsys, tmp_path):
    for folder in ("base/config", "recipe/config"):
        (tmp_path / folder).mkdir(parents=True)
    written(tmp_path / "base/config/trainer.yaml", BYPASS)
    mine = {"hydra": {"searchpath": ["file://base/config"]}, "defaults": ["trainer", "_self_"]}
    native = converted(capsys, "verl", written(tmp_path / "recipe/config/mine.yaml", mine))
    assert load_config(native["slime_ext"]) == load_config(
        {"verl": BYPASS["algorithm"]["rollout_correction"]}
    )
