"""``convert`` reads one file: it runs no script, composes nothing, resolves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_ext.tools.convert import CONVERTED
from slime_ext.tools.convert.places import COMPOSED
from tests.tools.commands.in_process import run, written

GUARD = """#!/usr/bin/env bash
set -euo pipefail
URLS="${URLS:-}"
if [ -z "$URLS" ]; then
  echo "URLS is required: the external servers" >&2
  exit 1
fi
python -m examples.train.main_agent trainer.algorithm.off_policy_correction.tis_ratio_type=token
"""
OVERRIDES = "python3 -m main_ppo algorithm.rollout_correction.rollout_is="
SCRIPTS = {  # file name and text: none of them is more than a script to convert
    "guard": ("guard.sh", GUARD),
    "guard after a command": ("guard.sh", GUARD.replace("URLS=", "nvidia-smi -L\nURLS=", 1)),
    "guard without if": (
        "guard.sh",
        f'#!/bin/bash\nset -eu\n[ -n "$URLS" ] || {{ exit 1; }}\n{OVERRIDES}token\n',
    ),
    "clashing overrides": ("run.sh", "python3 -m main_ppo a=null a.b=1\n"),
    "private use letter": ("run.sh", f"{OVERRIDES}\ue000\n"),
    "eval of itself": ("run.sh", 'x=\'eval "$x"\'; eval "$x"\n'),
    "a command": ("run.sh", "touch executed\n"),
    "without a suffix": ("launch", "#!/bin/sh\ntouch executed\n"),
    "a hydra program": (
        "main.py",
        "import hydra\nP = 'config'\n@hydra.main(config_path=P)\ndef main(config): ...\n",
    ),
    "no Python": ("main.py", "match x:\n  case\n"),
}


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("system", ["verl", "skyrl"])
def test_a_script_gets_one_line_that_says_what_to_convert(capsys, tmp_path, monkeypatch, name, system):
    file, text = SCRIPTS[name]
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, "convert", "--from", system, written(tmp_path / file, text))
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert f"{file}: expected a YAML, JSON or TOML file, got a script: {COMPOSED[system]}" in err
    assert [path.name for path in tmp_path.iterdir()] == [file]


def test_every_system_says_how_to_get_its_composed_configuration():
    assert COMPOSED.keys() == CONVERTED.keys() and "--cfg job" in COMPOSED["verl"]


EXECUTES = "open('executed', 'w').write('')\n"
COMPOSES = [  # the end of a file with a block of verl
    "defaults: [base, _self_]",
    "hydra: {searchpath: ['pkg://base.config']}\ndefaults: [base, _self_]",
    "defaults: [{algorithm@algorithm.rollout_correction: plain}, _self_]",
    "defaults: grpo_math_1B.yaml",
    "defaults: null",
]


def test_other_files_are_never_composed(tmp_path):
    """In a process of its own, started where packages lie that Hydra would import."""
    for package in ("hydra_plugins", "base", "base/config", "hydra"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(EXECUTES)
    (tmp_path / "hydra_plugins/evil.py").write_text(EXECUTES)
    (tmp_path / "base/config/base.yaml").write_text("algorithm: {rollout_correction: {bypass_mode: true}}")
    block = "algorithm: {rollout_correction: {rollout_is: token}}\n"
    for i, text in enumerate(COMPOSES):
        (tmp_path / f"{i}.yaml").write_text(block + text)
    converts = "import sys; from slime_ext.tools.commands import cli\nfor file in sys.argv[1:]:"
    converts += "\n    assert cli.main(['convert', '--from', 'verl', file]) == 2"
    words = [sys.executable, "-c", converts, *(f"{i}.yaml" for i in range(len(COMPOSES)))]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
    said = ran.stderr.splitlines()
    assert (ran.returncode, ran.stdout, len(said)) == (0, "", len(COMPOSES)), said
    assert all(
        "a composed configuration, got the key defaults, which adds other files" in line for line in said
    )
    assert not (tmp_path / "executed").exists()


def test_a_file_that_no_other_completes_is_read(capsys, tmp_path):
    path = written(tmp_path / "c.yaml", {"defaults": ["_self_"], "rollout_is": "token"})
    assert run(capsys, "convert", "--from", "verl", path)[0] == 0


SECRET = "${oc.env:SLIME_EXT_SECRET}"
UNRESOLVED = {  # system, file -> the key that is named
    ("verl", f"algorithm: {{rollout_correction: {{rollout_is_threshold: '{SECRET}'}}}}"): (
        "verl.rollout_is_threshold"
    ),
    ("verl", "{rollout_is: '${level}'}"): "verl.rollout_is",
    ("verl", f"algorithm: '{SECRET}'"): "algorithm",
    ("verl", f"algorithm: {{rollout_correction: '{SECRET}'}}"): "algorithm.rollout_correction",
    ("skyrl", f"trainer: {{algorithm: {{off_policy_correction: {{tis_ratio_type: '{SECRET}'}}}}}}"): (
        "skyrl.off_policy_correction.tis_ratio_type"
    ),
    ("areal", f"actor: {{rejection_sampling: {{upper: '{SECRET}'}}}}"): (
        "areal.rejection_sampling.upper"
    ),
    ("openrlhf", f"is_correction_threshold: ['{SECRET}']"): "openrlhf.is_correction_threshold",
}  # fmt: skip


@pytest.mark.parametrize("case", UNRESOLVED, ids=UNRESOLVED.get)
def test_an_interpolation_is_refused_by_its_key_and_neither_resolved_nor_printed(
    capsys, tmp_path, monkeypatch, case
):
    monkeypatch.setenv("SLIME_EXT_SECRET", "token")
    system, text = case
    status, out, err = run(capsys, "convert", "--from", system, written(tmp_path / "c.yaml", text))
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert err.startswith(f"slime-ext convert: {UNRESOLVED[case]}: expected a value, got an interpolation")
    assert "${" not in err and "oc.env" not in err


def test_an_interpolation_elsewhere_does_not_matter_and_a_note_does_not_print_it(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setenv("SLIME_EXT_SECRET", "9.5")
    text = f"""
    data: {{path: '{SECRET}'}}
    algorithm: {{gamma: '{SECRET}', rollout_correction: {{rollout_is: token}}}}
    actor_rollout_ref: {{actor: {{clip_ratio_c: '{SECRET}'}}}}
    """
    status, out, _ = run(capsys, "convert", "--from", "verl", written(tmp_path / "c.yaml", text))
    assert status == 0 and "# note: clip_ratio_c belongs to verl's loss" in out
    assert "9.5" not in out and "oc.env" not in out


def test_a_refusal_shows_a_line_of_a_value(capsys, tmp_path):
    long = "a" * 5000
    for block in ({"rollout_is": long}, {"rollout_is": "token", long: 1}, {"rollout_is": {long: long}}):
        path = written(tmp_path / "c.yaml", {"rollout_correction": block})
        status, out, err = run(capsys, "convert", "--from", "verl", path)
        assert (status, out) == (2, "") and err.count("\n") == 1 and "a" * 101 not in err
