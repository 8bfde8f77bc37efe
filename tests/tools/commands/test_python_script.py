"""Python launchers: executed with --run alone, and then the command that they would run is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slime_ext.errors import ConfigError
from slime_ext.tools.commands import cli
from slime_ext.tools.launch import read as launch_script

HOSTS = Path(os.environ.get("HOSTS", "absent"))
REFUSED = "expected a shell script, got a Python launcher, which has to be executed: add --run"
UTILITIES = """
import subprocess

def exec_command_cpu(command, capture_output=False):
    return _exec_command(command)

def _exec_command(command):
    subprocess.run(["bash", "-c", command], check=True)
"""
SCRIPT = """
import sys
from miles.utils.external_utils.command_utils import exec_command_cpu

if __name__ == "__main__":
    exec_command_cpu("touch started")
    {}
    exec_command_cpu("ray job submit -- python3 train.py --lr 1e-6 --json '[1, 2]' " + " ".join(sys.argv[1:]))
"""


@pytest.fixture(params=["miles", "slime"])
def script(request, tmp_path):
    package = tmp_path / request.param / "utils/external_utils"
    package.mkdir(parents=True)
    for folder in (package, *list(package.parents)[:2]):
        (folder / "__init__.py").touch()
    if request.param == "miles":
        (package / "exec_command.py").write_text(UTILITIES)
        (package / "command_utils.py").write_text("from miles.utils.external_utils.exec_command import *\n")
    else:
        free = "def get_free_port(*args): ...\n"  # which the stand-ins of a machine without CUDA replace
        (package.parent / "misc.py").write_text(UTILITIES + free)
        (package / "command_utils.py").write_text("from slime.utils.misc import exec_command_cpu\n")

    def write(line="pass"):
        (tmp_path / "run.py").write_text(SCRIPT.format(line).replace("miles", request.param))
        return str(tmp_path / "run.py")

    return write


@pytest.mark.parametrize(
    ("words", "status"), [("check", 1), ("doctor", 2), ("convert --from verl", 2), ("check c.yaml --args", 1)]
)
def test_no_command_executes_a_launcher_without_being_told(
    script, tmp_path, monkeypatch, capsys, words, status
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("slime_ext: {preset: token_tis}")
    path = script(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert cli.main([*words.split(), path]) == status
    assert not (tmp_path / "ran").exists() and not (tmp_path / "started").exists()
    _, err = capsys.readouterr()
    if words.startswith("check"):
        assert REFUSED in err and "after EXEC:" in err and err.count("\n") == 1


def test_the_submitted_job_is_read_and_no_command_is_run(script, tmp_path):
    launch = launch_script.read_launch(script(), ["--mode", "small"])
    assert [str(flag) for flag in launch.flags] == ["--lr 1e-6", "--json [1, 2]", "--mode small"]
    assert launch.flag("--lr").where == "run.py:8" and not (tmp_path / "started").exists()


def test_check_reads_it_with_its_own_flags(script, capsys):
    path = script()
    assert cli.main(["check", "--run", path]) == 0 and "add these flags" in capsys.readouterr().out
    ours = ["--use-tis", "--custom-tis-function-path", "slime_ext.tis.token_tis"]
    assert cli.main(["check", "--run", path, "--", *ours]) == 0 and "reweight" in capsys.readouterr().out
    assert cli.main(["check", path, "--run", "--", *ours, "--use-rollout-logprobs"]) == 1
    assert "--use-rollout-logprobs: expected off beside --use-tis" in capsys.readouterr().err
    # typer prints what it misses in a box, and ends with a number.
    box = "print('╭─ Error ─╮\\n│ Missing command. │\\n╰─────────╯', file=sys.stderr); sys.exit(2)"
    assert cli.main(["check", "--run", script(box)]) == 1
    assert capsys.readouterr().err.endswith(
        "got none: Missing command: give what it lacks after --, or start it yourself, save the command that "
        "it prints after EXEC: as run.sh, and check run.sh\n"
    )


@pytest.mark.parametrize(
    "call", ["__import__('os').system('touch {}')", "__import__('subprocess').Popen(['touch', '{}'])"]
)
def test_what_a_script_runs_by_itself_is_refused(script, tmp_path, call):
    with pytest.raises(ConfigError, match="the script itself would run"):
        launch_script.read_launch(script(call.format(tmp_path / "started")))
    assert not (tmp_path / "started").exists()


def test_a_script_elsewhere_is_refused(tmp_path):
    (tmp_path / "run.py").write_text("")
    with pytest.raises(ConfigError, match="expected a script in a checkout of slime or miles"):
        launch_script.read_launch(str(tmp_path / "run.py"))


@pytest.mark.slow
@pytest.mark.skipif(not HOSTS.is_dir(), reason="HOSTS names no folder of hosts")
def test_a_script_of_miles_is_read():
    launch = launch_script.read_launch(
        str(HOSTS / "miles-31f1ca9/scripts/run_qwen3_4b.py"), ["--mode", "debug_minimal"]
    )
    assert launch.value("--rollout-max-response-len") == "100" and launch.value("--num-layers") == "36"


def test_the_program_for_several_adapters_is_a_launch(script, capsys):
    path = script()
    Path(path).write_text(Path(path).read_text().replace("train.py", "/root/train_multi_lora_async.py"))
    assert cli.main(["check", "--run", path]) == 0 and "add these flags" in capsys.readouterr().out
    assert launch_script.read_launch(path).asynchronous


def test_a_script_called_from_its_own_folder_is_read(script, tmp_path, monkeypatch):
    (tmp_path / "scripts").mkdir()
    Path(script()).rename(tmp_path / "scripts/run.py")
    monkeypatch.chdir(tmp_path / "scripts")
    assert launch_script.read_launch("run.py").value("--lr") == "1e-6"
