"""Hydra's overrides in scripts, as verl and SkyRL are really configured, over files that Hydra composes."""

from __future__ import annotations

import pytest
import yaml

from slime_ext import load_config
from slime_ext.tools.scripts import hydra
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
        ("verl", "python3 -m verl.trainer.main_ppo data.x=1", "got none: verl corrects nothing without"),
        ("verl", SCRIPT.replace("=token", "=$LEVEL"), "expected a value that the script itself says, got"),
        (
            "trll",
            SCRIPT,
            "--from: expected a known system, got 'trll'; did you mean 'trl'? (known: verl",
        ),
    ):
        status, _, err = run(capsys, "convert", "--from", system, written(path, text))
        assert status == 2 and line in err
    status, _, err = run(capsys, "check", written(path, SCRIPT))
    assert status == 1 and f"slime-ext convert --from verl {path}" in err


PROGRAM = """
import hydra

@hydra.main(config_path="config", config_name="mine", version_base=None)
def main(config): ...
"""
FILES = {
    "recipe/mine/main.py": PROGRAM,
    "recipe/mine/config/mine.yaml": """
hydra: {searchpath: ["pkg://base.config", "file://nowhere"]}
defaults: [base, _self_]
algorithm: {rollout_correction: {bypass_mode: true}}
""",
    "recipe/mine/config/other.yaml": "algorithm: {rollout_correction: {bypass_mode: false}}",
    "base/config/base.yaml": """
defaults: [{algorithm@algorithm.rollout_correction: plain}, _self_]
level: token
""",
    "base/config/algorithm/plain.yaml": "{rollout_is: null, bypass_mode: false, loss_type: ppo_clip}",
    "base/config/algorithm/reinforce.yaml": "{rollout_is: '${level}', loss_type: reinforce}",
}
SET = "algorithm.rollout_correction.rollout_is_threshold=3"
START = f"python3 -m recipe.mine.main {SET}"
BYPASS = {"rollout_is_threshold": 3, "bypass_mode": True}
COMPOSED = {  # a script, or a file -> the block that Hydra makes of it
    START: BYPASS,
    f"python3 recipe/mine/main.py {SET}": BYPASS,
    f"{START} algorithm.rollout_correction.bypass_mode=false algorithm.rollout_correction.rollout_is=token": {
        "rollout_is": "token",
        "rollout_is_threshold": 3,
    },
    f"{START} algorithm@algorithm.rollout_correction=reinforce level=token": BYPASS
    | {"rollout_is": "token", "loss_type": "reinforce"},
    f"{START} --config-path=../../base/config --config-name base": {"rollout_is_threshold": 3},
    f'HERE="$(pwd)"; {START} --config-path="$HERE/base/config" --config-name=base': {
        "rollout_is_threshold": 3
    },
    f"{START} -cn=other.yaml algorithm.rollout_correction.rollout_is=token": {
        "rollout_is": "token",
        "rollout_is_threshold": 3,
    },
    "recipe/mine/config/mine.yaml": {"bypass_mode": True},
}
UNSEEN = {  # a script or a file -> why it is refused
    "python3 -m recipe.gone.main algorithm.x=1": "alone, got recipe.gone.main: convert the output of",
    f"{START} --config-name $NAME": "got --config-name $NAME",
    f"{START} --config-dir=/far": "got --config-dir /far",
    f"{START} --config-name gone": "expected files that Hydra composes, got",
    "python3 -m recipe.mine.main ~algorithm.rollout_correction.rollout_is": "that are set, got ~algorithm",
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        written(tmp_path / name, text)
    monkeypatch.chdir(tmp_path)
    return lambda text: text if text in FILES else written(tmp_path / "run.sh", text)


@pytest.mark.parametrize("text", COMPOSED)
def test_what_files_set_below_the_overrides_is_kept(capsys, tree, text):
    """Else another algorithm is printed: with bypass_mode the behavior policy is the anchor."""
    pytest.importorskip("hydra", reason="bash tests/adapters/real.sh")
    native = converted(capsys, "verl", tree(text))
    assert load_config(native["slime_ext"]) == load_config({"verl": COMPOSED[text]})


@pytest.mark.parametrize("text", UNSEEN)
def test_what_is_not_seen_is_refused(capsys, tree, text):
    if "composes" in UNSEEN[text]:
        pytest.importorskip("hydra", reason="bash tests/adapters/real.sh")
    status, out, err = run(capsys, "convert", "--from", "verl", tree(text))
    assert (status, out) == (2, "") and UNSEEN[text] in err and err.count("\n") == 1
    assert "--cfg job" in err or "~" in text


def test_hydra_is_not_there(capsys, tree, monkeypatch):
    monkeypatch.setattr(hydra.importlib.util, "find_spec", lambda name: None)
    for text in (START, "recipe/mine/config/mine.yaml"):
        status, out, err = run(capsys, "convert", "--from", "verl", tree(text))
        assert (status, out) == (2, "") and "got none: pip install hydra-core, or convert" in err
    path = written(
        tree("run.sh").with_name("alone.yaml"),
        "{defaults: [_self_], rollout_is: token, rollout_is_threshold: 3}",
    )
    assert converted(capsys, "verl", path)["slime_ext"]["steps"]
