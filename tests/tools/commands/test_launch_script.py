"""Launch scripts read without being run: by hand, and every one in the hosts' trees (HOSTS)."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from slime_ext.errors import ConfigError
from slime_ext.tools.launch import script_run
from slime_ext.tools.launch.launch import READ
from slime_ext.tools.launch.read import read_launch as read
from slime_ext.tools.launch.read import request_of
from slime_ext_cpu.rehearsal.replace import sizes_of

pytestmark = pytest.mark.usefixtures("in_process")
HOSTS = Path(os.environ.get("HOSTS", "absent"))
SCRIPT = """#!/bin/bash
pkill -9 python
DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
LAYERS=7 source "${DIR}/models/small.sh"
LR=${LR:-1e-6}
A=(
   --lr $LR  # --lr 3
   #--eps-clip 0.3
   --name "two words"
)
A+=(--experts $((EXPERTS * 2)))
if [ -n "$UNSET" ]; then A+=(--unset 1)
else
   A+=(--set 1)
fi
if [ "$LR" == 1e-6 ]; then
   A+=(--usual)
fi
FLAGS="--x 1 --y 2"
RUNTIME="{
  \\"env_vars\\": {
    \\"PYTHONPATH\\": \\"/root/Megatron:${DIR}\\",
    \\"MINE\\": \\"1\\"
  }
}"
ray job submit --runtime-env-json="${RUNTIME}" -- python3 train_async.py \\
   --size $(( 4 * 1024 )) ${MODEL_ARGS[@]} \\
   "${A[@]}" $FLAGS ${NONE[@]} 2>&1 | tee log
# not --lr 9
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.delenv("LR", raising=False)
    (tmp_path / "models").mkdir()
    (tmp_path / "models/small.sh").write_text('EXPERTS=4\nMODEL_ARGS=(--num-layers "${LAYERS:-3}")\n')

    def write(text=SCRIPT):
        (tmp_path / "run.sh").write_text(text)
        return str(tmp_path / "run.sh")

    return write


def test_a_launch_is_what_a_shell_would_make_of_the_script(script, tmp_path):
    launch = read(script())
    said = {flag.name: flag.values for flag in launch.flags}
    assert said == {
        "--size": ("4096",),
        "--num-layers": ("7",),
        "--lr": ("1e-6",),
        "--name": ("two words",),
        "--experts": ("8",),
        "--set": ("1",),
        "--usual": (),
        "--x": ("1",),
        "--y": ("2",),
    }
    assert launch.asynchronous and launch.environment == {
        "PYTHONPATH": f"/root/Megatron:{tmp_path}",
        "MINE": "1",
    }


def test_a_flag_is_placed_where_it_was_written_last_outside_comments(script):
    launch = read(script())
    places = {flag.name: flag.where for flag in launch.flags}
    assert places["--lr"] == "run.sh:7" and places["--num-layers"] == "small.sh:2"


def test_words_of_the_command_line_are_the_scripts_own(script):
    launch = read(script('python3 train.py --a 1 "$@"'), ["--b", "2"])
    assert [str(flag) for flag in launch.flags] == ["--a 1", "--b 2"]


def test_flags_of_both_branches_of_a_test_that_only_the_cluster_can_make_are_unknown(script):
    text = "A=(--x 1)\nif [ -f /x ]; then A+=(--a); else A+=(--b); fi\npython3 train.py ${A[@]} --c"
    launch = read(script(text))
    assert [flag.name for flag in launch.flags] == ["--x", "--b", "--c"]
    why = "run.sh:2: [ -f /x ] is known only where the script runs"
    assert launch.unknown == {"--a": why, "--b": why} and not launch.others
    assert not launch.is_known("--b") and launch.is_known("--x") and launch.is_known("--d")


def test_a_sourced_file_that_is_not_there_is_said_and_none_elsewhere_is_taken(script, tmp_path):
    launch = read(script("source /none/models/small.sh\npython3 train.py --x 1 ${MODEL_ARGS[@]}"))
    assert [flag.name for flag in launch.flags] == ["--x"]
    assert "source /none/models/small.sh is not here" in launch.others
    assert launch.unknown.keys() == READ | {"--x"}


def test_a_file_of_the_container_is_read_from_the_checkout_and_that_is_said(script, tmp_path):
    (tmp_path / "train.py").touch()
    (tmp_path / "slime").mkdir()
    launch = read(script("source /root/slime/models/small.sh\npython3 train.py ${MODEL_ARGS[@]}"))
    assert launch.value("--num-layers") == "3" and not launch.others
    assert launch.notes == (
        f"run.sh:1: /root/slime/models/small.sh is not here; {tmp_path}/models/small.sh is read instead",
    )


def test_what_a_user_may_not_look_into_is_not_there(script, monkeypatch):
    """slime's scripts say /root/slime, and who checks one need not be root."""
    stat = os.stat

    def of_a_user(path, *args, **kwargs):
        if str(path).startswith("/closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", of_a_user)
    lines = "cd /closed/slime\nsource /closed/slime/models/small.sh\npython3 train.py --x 1"
    path = script(f"{lines} --custom-config-path /closed/c.yaml ${{MODEL_ARGS[@]}}")
    launch = script_run.launch_of(request_of(path))  # in this process
    assert [flag.name for flag in launch.flags] == ["--x", "--custom-config-path"] and launch.others


ONE_LINE = {
    "python3 other.py --a": "expected a launch of slime or miles, got none: check the script that starts",
    "B=(--b)\npython3 train.py \\\n  --a 1\n  ${B[@]} \\\n  ${C[@]}": r"run\.sh:4: .* lacks the backslash",
    "B=(--b)\npython3 train.py \\\n  --a 1\n  ${B[@]}": r"run\.sh:4: expected the launch to go on, got \$\{B",
    "python3 train.py --a 1 \\ \n  --b": r"run\.sh:2: .* has a space behind its backslash: remove the space",
    "python3 train.py \\\n  # --a 1 \\\n  --b": r"run\.sh:3: .* ends in a comment, and no backslash",
    "python3 train.py --a 1 \\\n\n  --b": r"run\.sh:3: .* is empty: remove it",
    "python3 train.py --a 1 \u2013use-tis": r"run\.sh:1: expected --use-tis, got .use-tis, .* two hyphens",
    "python3 train.py --colocate -eps-clip=1": r"run\.sh:1: expected --eps-clip, got -eps-clip, ",
    "python3 train.py --a 1\r\n": r"run\.sh:1: expected lines that end in \\n, got",
    "f() { f; }; f": "expected a script that ends, got none: .* function depth",
    'echo "\npython3 train.py': "expected a script that bash can read, got line",
    "while true; do X=1$X; done": "expected a script that ends, got none",
    '[ -n "$1" ] || exit 1\npython3 train.py': r"it ends at run\.sh:1: pass what it asks for",
    'if [ $# -lt 2 ]; then\n  echo "Usage: $0 <MODE>"\n  echo "MODE: a"\n  exit 1\nfi\npython3 train.py': (
        r'it ends at run\.sh:4, saying "Usage: \$0 <MODE>": pass what it asks for, as variables with --env'
    ),
    "die() { echo 'no node' >&2; exit 1; }\n[ -n \"$1\" ] || die\npython3 train.py": (
        r'it ends at run\.sh:1, saying "no node": pass'
    ),
    'set -e\nX=1; test "$X" = 2 # no\npython3 train.py': r'2, where test "\$X" = 2 fails under set -e: pass',
    "set -o errexit\n(exit 3)\npython3 train.py": r"it ends at run\.sh:2",
}


@pytest.mark.parametrize("text", ONE_LINE)
def test_what_no_launch_can_be_read_of_is_one_line(script, text):
    with pytest.raises(ConfigError, match=ONE_LINE[text]) as caught:
        read(script(text))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_test_of_a_variable_that_nothing_sets_is_read_as_if_it_succeeded(script):
    launch = read(script('set -euo pipefail\n[[ "${MODE:-}" == rl ]]\npython3 train.py --a 1'))
    fails = 'where [[ "${MODE:-}" == rl ]] fails under set -e'
    assert launch.value("--a") == "1" and launch.notes == (
        f"run.sh:2: the script can end here, {fails}, before a launch; read as if every test of the machine "
        "succeeded",
        f"run.sh:2: nothing here sets $MODE, and without it the script ends, {fails}",
    )


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("python3 train.py\npython3 train.py --a", "run.sh:2: {} another launch at run.sh:1"),
        ("nohup python3 train.py &\nX=1 python3 train.py --a", "run.sh:2: {} another launch at run.sh:1"),
        (
            "python3 train.py\npython3 train.py --a\npython3 train.py --a",
            "run.sh:3: {} another launch at run.sh:1",
        ),
        (
            "python3 train.py && python3 train.py --a",
            "run.sh:1: {} several launches here; the last one is read",
        ),
        (
            "ssh h 'python3 train.py'\nssh h 'python3 train.py --a'",
            "run.sh: {} several launches here; the last one is read",
        ),
        ("for i in 1 2; do python3 train.py --a; done", ""),
    ],
)
def test_a_script_with_several_launches_says_which_is_read(script, text, note):
    launch = read(script(text))
    starts = "this launch is read; the script starts" if "another" in note else "the script starts"
    assert launch.flag("--a") and launch.notes == ((note.format(starts),) if note else ())


@pytest.mark.parametrize(
    ("end", "note"),
    [
        ("", "run.sh:3: the script starts another launch here if one fails; it is not read"),
        ("\r", "other.sh:1: expected lines .*; the script reads this only if a launch fails"),
    ],
)
def test_what_only_a_failure_shows_says_nothing_about_the_launch_that_is_read(script, tmp_path, end, note):
    (tmp_path / "other.sh").write_text(f"A=(--b){end}\n")
    launch = read(script("python3 train.py --a 1 || {\nsource other.sh\npython3 train.py ${A[@]}\n}"))
    assert launch.value("--a") == "1" and not launch.unknown and "--b" not in launch.text
    (said,) = launch.notes
    assert re.fullmatch(note, said)


WAITS = """set -e
wait_for_workers() {
  while true; do
    UP=$(count_workers || echo 0)
    [ "$UP" -ge "$WORKERS" ] && return
    sleep 5
  done
}
wait_for_workers
python3 train.py --a 1
"""


def test_a_loop_that_waits_for_the_machine_is_no_failure(script, monkeypatch):
    """The sandbox ends a run that stays in a loop, and so nothing in the script has failed."""
    monkeypatch.delenv("WORKERS", raising=False)
    launch = read(script(WAITS))
    assert launch.is_known("--a") and launch.notes == (
        "run.sh:3: the script can stay in a loop here, before a launch; read as if every test of the machine "
        "succeeded",
    )


NEEDS = """set -e
if [ -z "${BASE_FOLDER}" ]; then
  echo "BASE_FOLDER is not set. Please set it."
  exit 1
fi
ADDRESS=${ADDRESS:-}
[ -n "$ADDRESS" ] || { echo 'no ADDRESS'; exit 1; }
python3 train.py --hf-checkpoint ${BASE_FOLDER}/x --b 1
"""


def test_a_script_that_asks_for_variables_is_read_as_if_they_were_set(script, monkeypatch):
    monkeypatch.delenv("BASE_FOLDER", raising=False)
    monkeypatch.delenv("ADDRESS", raising=False)
    launch = read(script(NEEDS))
    assert launch.is_known("--b") and str(launch.flag("--hf-checkpoint")).endswith(" $BASE_FOLDER/x")
    ends = "and without it the script ends, saying"
    assert launch.notes == (
        f'run.sh:4: nothing here sets $BASE_FOLDER, {ends} "BASE_FOLDER is not set. Please set it."',
        f'run.sh:7: nothing here sets $ADDRESS, {ends} "no ADDRESS"',
    )


@pytest.mark.skipif(not HOSTS.is_dir(), reason="HOSTS names no folder of hosts")
def test_every_script_of_slime_is_read(monkeypatch):
    """Whole: a model, data, sizes; the one that its own authors broke is found."""
    variables = ("BASE_DIR", "BASE_FOLDER", "MASTER_ADDR")
    for name in variables:
        monkeypatch.setenv(name, "/data")
    broken, gone, count = set(), set(), 0
    for path in sorted(HOSTS.glob("slime-*/**/*.sh")):
        if path.parent.name in ("models", "tests") or "train" not in path.read_text():
            continue
        count += 1
        try:
            launch = read(str(path), environment=variables)
        except ConfigError as error:
            assert "lacks the backslash" in str(error) or "that bash can read" in str(error), path
            broken.add(path.name)
            continue
        if launch.value("--train-backend") == "fsdp":  # whose model is its checkpoint's
            continue
        if launch.others:
            gone.add(path.name)
            assert "is not here)" in launch.others, path
            continue
        assert {"--num-layers", "--hf-checkpoint", "--prompt-data"} <= {f.name for f in launch.flags}, path
        assert sizes_of(launch).steps >= 1 and launch.number("--num-layers", 0) > 1, path
        assert not launch.flag("--hf-checkpoint").values[0].startswith("$"), path
    assert len(gone) < 10  # whose sources lie nowhere
    assert count > 100 and broken - {"run-qwen3-next-80B-A3B.sh"} == {
        "run-kimi-k2-Instruct.sh",
        "run-kimi-k2-Thinking.sh",
    }
