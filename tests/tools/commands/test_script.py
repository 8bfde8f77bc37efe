"""Launch scripts, which ``check`` reads as the shell and slime do: what counts, and what is passed over."""

from __future__ import annotations

import pytest

from tests.tools.commands.test_commands import GOOD, run, written

UNDERSCORES = "--use-tis --custom_tis_function_path slime_ext.tis.token_tis"
INIT = "--custom-megatron-init-path slime_ext.host.init"


def test_a_flag_counts_in_its_own_spelling_alone(capsys, tmp_path):
    for flags, line in {
        UNDERSCORES: "expected --custom-tis-function-path, got --custom_tis_function_path",
        f"{GOOD} {INIT.replace('init-path', 'init_path')}": "expected --custom-megatron-init-path, got",
        f"{GOOD} --eps_clip 0.1": "expected --eps-clip, got --eps_clip",
        GOOD.replace("use-tis", "use_tis"): "expected --use-tis, got --use_tis",
    }.items():
        status, out, err = run(capsys, "check", written(tmp_path / "run.sh", f"python3 train.py {flags}"))
        assert (status, out) == (1, "") and line in err


def test_a_key_counts_in_its_own_spelling_alone(capsys, tmp_path):
    values = {"use_tis": True, "custom_tis_function_path": "slime_ext.tis.correct"}
    values |= {"custom_megatron_init_path": "slime_ext.host.init", "slime_ext": {"preset": "geo_rs"}}
    for key in ("use_tis", "custom_tis_function_path", "custom_megatron_init_path"):
        dashed = {k.replace("_", "-") if k == key else k: v for k, v in values.items()}
        status, _, err = run(capsys, "check", written(tmp_path / "c.yaml", dashed))
        assert status == 1 and f"expected {key}, got {key.replace('_', '-')}" in err


UNUSED = {
    "another is": f"CORR=({GOOD})\nOTHER=(--lr 1)\npython3 train.py ${{OTHER[@]}}",
    "in a comment": f"CORR=(\n  {GOOD}\n)\npython3 train.py  # ${{CORR[@]}}",
    "it grows": f"CORR=()\nCORR+=({GOOD})\nray job submit -- python3 train_async.py",
}


def test_flags_of_an_array_that_no_launch_looks_at_are_refused(capsys, tmp_path):
    line = 'CORR: expected "${CORR[@]}" in the launch, got none: its flags reach nothing'
    for name, text in UNUSED.items():
        status, _, err = run(capsys, "check", written(tmp_path / "run.sh", text))
        assert status == 1 and line in err, name


USED = {
    "an array that grows": f"if true; then TIS+=({GOOD}); fi\ntrain.py ${{TIS[@]}}",
    "an apostrophe in a comment": f"# it's off\ntrain.py \\\n   {GOOD}  # isn't it",
    "a variable with a comment": f'readonly TIS="{GOOD}"  # on\ntrain.py $TIS',
    "to somebody": f"echo python3 train.py {GOOD} | bash",
    "flags that look alike": f"train.py --custom-agent-function-path c {GOOD}",
    "by name": f"CORR=({GOOD})\nlaunch() {{ local -n a=$1; python3 train.py ${{a[@]}}; }}\nlaunch CORR",
    "beside one that decides nothing": f"PERF=(--lr 1)\npython3 train.py {GOOD}",
}


def test_flags_are_found_wherever_a_shell_finds_them(capsys, tmp_path):
    for name, text in USED.items():
        status, out, err = run(capsys, "check", written(tmp_path / "run.sh", text))
        assert (status, err) == (0, "") and "truncate(high 2)" in out, name


def test_what_a_script_only_says_does_not_count(capsys, tmp_path):
    for line in ("echo {}", "  printf '%s\\n' {}", "echo \\\n  {}"):
        text = line.format(GOOD) + "\npython3 train.py --lr 1"
        status, out, _ = run(capsys, "check", written(tmp_path / "run.sh", text))
        assert status == 0 and "not used by this launch" in out, line


CORRECT = "--use-tis --custom-tis-function-path slime_ext.tis.correct"


def test_a_path_that_only_a_shell_knows_is_said_to_be_one(capsys, tmp_path):
    for path in ("$(pwd)/c.yaml", "$UNKNOWN/c.yaml", "$(where)/c.yaml"):
        text = f'train.py {CORRECT} --custom-config-path "{path}"'
        status, _, err = run(capsys, "check", written(tmp_path / "run.sh", text))
        line = f"run.sh: --custom-config-path: expected a path that the script itself says, got '{path}': "
        assert status == 1 and line in err


def test_a_script_is_known_by_its_name_or_its_first_line(capsys, tmp_path):
    for name, text in {
        "run.slurm": "#!/bin/bash\n#SBATCH --nodes=4\ntrain.py {}",
        "run.sbatch": "train.py {}",
        "run.zsh": "train.py {}",
        "run.job": "#!/usr/bin/env bash\ntrain.py {}",
    }.items():
        status, out, err = run(capsys, "check", written(tmp_path / name, text.format(GOOD)))
        assert (status, err) == (0, "") and "truncate(high 2)" in out, name


def test_a_yaml_file_by_another_name_is_none(capsys, tmp_path):
    path = written(tmp_path / "c.conf", {"slime_ext": {"preset": "geo_rs"}})
    assert run(capsys, "check", path)[0] == 0


def test_flags_of_the_scripts_own_stand_behind_any_other(capsys, tmp_path):
    path = written(tmp_path / "run.sh", 'python3 train.py "$@"')
    for first in ((path, "--args", path), ("--args", path, path)):
        assert "truncate(high 2)" in run(capsys, "check", *first, "--", *GOOD.split())[1]


OWN_FUNCTIONS = {
    "--custom-megatron-init-path token": "init-path: expected package.module.function, got 'token'",
    "--custom-megatron-init-path mine.ini": "got 'mine.ini': mine.py has no ini; did you mean 'init'?",
    "--custom-advantage-function-path mine.sub.f": "got 'mine.sub.f': no module mine.sub",
    "--custom-megatron-init-path mine.init": None,
    "--custom-megatron-init-path far.away.init": None,  # on the cluster, perhaps
}


def test_functions_that_nobody_can_import_are_refused_and_those_elsewhere_are_not(capsys, tmp_path):
    written(tmp_path / "mine.py", "def init(args): ...\n")
    for flags, line in OWN_FUNCTIONS.items():
        text = f"python3 train.py {GOOD} {flags}"
        status, out, err = run(capsys, "check", written(tmp_path / "run.sh", text))
        assert (
            (status == 1 and line in err)
            if line
            else (status == 0 and "calls slime_ext.host.init" in " ".join(out.split()))
        ), flags


def test_advice_measures_first_and_says_what_a_correction_would_replace(capsys, tmp_path):
    for flags, theirs in (
        ("--use-tis --tis-clip 5", "slime's own weights"),
        ("--use-tis --custom-tis-function-path far.away.weights", "far.away.weights"),
    ):
        _, out, _ = run(capsys, "check", written(tmp_path / "run.sh", f"python3 train.py {flags}"))
        first, _, then = out.partition("then")
        assert "applies no correction" in first and "--custom-tis" not in first and theirs not in first
        assert f"in place of {theirs}" in then and "slime_ext.tis.token_tis" in then


THEIRS = (
    *("", "--use-tis", "--use-score-centering --use-tis", "--custom-megatron-init-path my.init"),
    "--use-tis --custom-tis-function-path far.away.weights",
)


@pytest.mark.parametrize("flags", THEIRS)
def test_measuring_beside_any_correction_is_right(capsys, tmp_path, flags):
    """``init`` by flag or from the user's own; before, nothing of ours would have run."""
    ours = "--custom-megatron-init-path slime_ext.host.init"
    if "init" in flags:
        ours = "--custom-rollout-log-function-path slime_ext.host.log_rollout"
    path = written(tmp_path / "run.sh", f"python3 train.py {ours} {flags}")
    status, out, err = run(capsys, "check", path)
    assert (status, err) == (0, "") and "slime_ext  measures" in out and out.rstrip().endswith("ok")
    assert ("my.init calls slime_ext.host.init(args)" in out) is ("my.init" in flags)


UNKNOWN = {
    "mapfile -t A < flags\npython3 train.py --lr 1 ${A[@]}": "not known whether this launch uses it",
    f"mapfile -t A < flags\npython3 train.py ${{A[@]}} {GOOD}": "truncate(high 2)",
    f"python3 train.py {GOOD} --eps-clip $(cat clip)": "--eps-clip $(cat clip): known only where the",
    f"if smi; then S=x; fi\npython3 train.py {GOOD} --loss-type $S": "smi is known only",
    f"A=()\nif smi; then A+=(--loss-type x); fi\npython3 train.py {GOOD} ${{A[@]}}": "smi is known only",
    "source /none/env.sh\npython3 train.py $FLAGS": "source /none/env.sh is not here",
    'eval "$(setup)"\npython3 train.py $FLAGS': "eval $(setup) is not here",
}


def test_what_is_unknown_is_neither_ok_nor_refused(capsys, tmp_path):
    for text, line in UNKNOWN.items():
        status, out, err = run(capsys, "check", written(tmp_path / "run.sh", text))
        assert (status, err) == (0, "") and line in out, (text, out)
        assert out.rstrip().endswith("not all known, so not all checked"), text


def test_a_script_without_a_launch_of_a_host_is_none(capsys, tmp_path):
    for text, line in {
        f"CORR=({GOOD})": "got none: check the script that starts train.py",
        '[ -n "$1" ] || exit 1\npython3 train.py': "got none: it ends at run.sh:1: give it what it asks for",
    }.items():
        status, out, err = run(capsys, "check", written(tmp_path / "run.sh", text))
        assert (status, out) == (1, "") and line in err
