"""Launch scripts, which ``check`` reads as the shell and slime do: what counts, and what is passed over."""

from __future__ import annotations

import pytest

from tests.commands.test_commands import GOOD, run, written

UNDERSCORES = "--use-tis --custom_tis_function_path slime_ext.tis.token_tis"
INIT = "--custom-megatron-init-path slime_ext.host.init"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (UNDERSCORES, "expected --custom-tis-function-path, got --custom_tis_function_path"),
        (f"{GOOD} {INIT.replace('init-path', 'init_path')}", "expected --custom-megatron-init-path, got"),
        (f"{GOOD} --eps_clip 0.1", "expected --eps-clip, got --eps_clip"),
        (GOOD.replace("use-tis", "use_tis"), "expected --use-tis, got --use_tis"),
    ],
)
def test_a_flag_counts_in_its_own_spelling_alone(capsys, tmp_path, flags, line):
    status, out, err = run(capsys, "check", written(tmp_path / "run.sh", f"python3 train.py {flags}"))
    assert (status, out) == (1, "") and line in err


@pytest.mark.parametrize("key", ["use_tis", "custom_tis_function_path", "custom_megatron_init_path"])
def test_a_key_counts_in_its_own_spelling_alone(capsys, tmp_path, key):
    values = {"use_tis": True, "custom_tis_function_path": "slime_ext.tis.correct"}
    values |= {"custom_megatron_init_path": "slime_ext.host.init", "slime_ext": {"preset": "geo_rs"}}
    dashed = {k.replace("_", "-") if k == key else k: v for k, v in values.items()}
    status, _, err = run(capsys, "check", written(tmp_path / "c.yaml", dashed))
    assert status == 1 and f"expected {key}, got {key.replace('_', '-')}" in err


UNUSED = {
    "another is": f"CORR=({GOOD})\nOTHER=(--lr 1)\npython3 train.py ${{OTHER[@]}}",
    "in a comment": f"CORR=(\n  {GOOD}\n)\npython3 train.py  # ${{CORR[@]}}",
    "it grows": f"CORR=()\nCORR+=({GOOD})\nray job submit -- python3 train_async.py",
    "of ours": f"CORR=({GOOD});\nslime-ext train",
}


@pytest.mark.parametrize("name", UNUSED)
def test_flags_of_an_array_that_no_launch_looks_at_are_refused(capsys, tmp_path, name):
    status, _, err = run(capsys, "check", written(tmp_path / "run.sh", UNUSED[name]))
    line = 'CORR: expected "${CORR[@]}" in the launch, got none: its flags reach nothing'
    assert status == 1 and line in err


USED = {
    "an array on one line": f"TIS=({GOOD})\npython3 train.py ${{TIS[@]}}",
    "an array that grows": f"if true; then TIS+=({GOOD}); fi",
    "after a quote over lines": f"ray job submit --runtime-env-json='{{\n \"a\": 1\n}}' -- train.py {GOOD}",
    "an apostrophe in a comment": f"# it's off\ntrain.py \\\n   {GOOD}  # isn't it",
    "a variable with a comment": f'readonly TIS="{GOOD}"  # on\ntrain.py $TIS',
    "a quote without an end": f'echo "\n{GOOD}',
    "flags that look alike": f"{GOOD} --custom-loss-function-path a.b --custom-agent-function-path c",
    "as words": f'CORR=({GOOD})\npython3 train.py "${{CORR[@]}}"',
    "in another": f"CORR=({GOOD})\nALL=(${{CORR[@]}})\npython3 train.py ${{ALL[@]}}",
    "by name": f"CORR=({GOOD})\nlaunch() {{ local -n a=$1; python3 train.py ${{a[@]}}; }}\nlaunch CORR",
    "by a file that reads this one": f"CORR=({GOOD})",
    "beside one that decides nothing": f"PERF=(--lr 1)\npython3 train.py {GOOD}",
}


@pytest.mark.parametrize("name", USED)
def test_flags_are_found_wherever_a_shell_finds_them(capsys, tmp_path, name):
    status, out, err = run(capsys, "check", written(tmp_path / "run.sh", USED[name]))
    assert (status, err) == (0, "") and "truncate(high 2)" in out


@pytest.mark.parametrize("line", ["echo {}", "  printf '%s\\n' {}", "echo \\\n  {}"])
def test_what_a_script_only_says_does_not_count(capsys, tmp_path, line):
    text = line.format(GOOD) + "\npython3 train.py --lr 1"
    status, _, err = run(capsys, "check", written(tmp_path / "run.sh", text))
    assert status == 1 and "nothing of slime_ext would run" in err


@pytest.mark.parametrize("line", ["echo on && python3 train.py {}", "echo python3 train.py {} | bash"])
def test_what_a_script_says_to_somebody_counts(capsys, tmp_path, line):
    assert run(capsys, "check", written(tmp_path / "run.sh", line.format(GOOD)))[0] == 0


FOLLOWED = {
    "a default in a default": '--custom-config-path "${BASE:-${HERE:-.}/sub}/c.yaml"',
    "a default that is empty or not": "--custom-config-path ${BASE-sub}/c.yaml",
    "a default that is kept": ': "${CFG:=sub/c.yaml}"\npython3 train.py --custom-config-path $CFG',
    "a default that is used and kept": "--custom-config-path ${CFG:=sub/c.yaml}",
}
CORRECT = "--use-tis --custom-tis-function-path slime_ext.tis.correct"


@pytest.mark.parametrize("name", FOLLOWED)
def test_defaults_of_variables_are_followed(capsys, tmp_path, name):
    (tmp_path / "sub").mkdir()
    written(tmp_path / "sub/c.yaml", {"slime_ext": {"preset": "geo_rs"}})
    status, out, err = run(capsys, "check", written(tmp_path / "run.sh", f"{FOLLOWED[name]} {CORRECT}"))
    assert (status, err) == (0, "") and "preset" in out


@pytest.mark.parametrize("path", ["$(pwd)/c.yaml", "$UNKNOWN/c.yaml", "`pwd`/c.yaml"])
def test_a_path_that_only_a_shell_knows_is_said_to_be_one(capsys, tmp_path, path):
    text = f'train.py {CORRECT} --custom-config-path "{path}"'
    status, _, err = run(capsys, "check", written(tmp_path / "run.sh", text))
    line = f"run.sh: --custom-config-path: expected a path that the script itself says, got '{path}': "
    assert status == 1 and line in err


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (f'train.py --note "a # b" {GOOD}', 0),
        (f"train.py --note 'a # b' {GOOD}  # it's on", 0),
        (f"train.py --note a # {GOOD}", 1),
        (f'NOTE="a # b"\ntrain.py --note "$NOTE" {GOOD}', 0),
        (f"train.py \\\n  # {GOOD} \\\n {GOOD}", 1),
    ],
)
def test_a_number_sign_in_quotes_is_no_comment(capsys, tmp_path, text, status):
    assert run(capsys, "check", written(tmp_path / "run.sh", text))[0] == status


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.slurm", "#!/bin/bash\n#SBATCH --nodes=4\ntrain.py {}"),
        ("run.sbatch", "train.py {}"),
        ("run.zsh", "train.py {}"),
        ("run.job", "#!/usr/bin/env bash\ntrain.py {}"),
    ],
)
def test_a_script_is_known_by_its_name_or_its_first_line(capsys, tmp_path, name, text):
    status, out, err = run(capsys, "check", written(tmp_path / name, text.format(GOOD)))
    assert (status, err) == (0, "") and "truncate(high 2)" in out


def test_a_yaml_file_by_another_name_is_none(capsys, tmp_path):
    path = written(tmp_path / "c.conf", {"slime_ext": {"preset": "geo_rs"}})
    assert run(capsys, "check", path)[0] == 0
