"""A launch script in Python that submits no job."""

from __future__ import annotations

import pytest

from slime_ext.errors import ConfigError
from slime_ext.tools.launch import python_script

USAGE = (
    "import argparse; parser = argparse.ArgumentParser(); parser.add_argument('model'); parser.parse_args()"
)
HELP = "import logging; logging.warning('no GPU'); print('usage: run.py MODEL'); raise SystemExit(1)"
MISC = """
def exec_command(command): ...
def get_free_port(*args): ...  # which the stand-ins of a machine without CUDA replace
"""
SUBMITS = """
from beside import words
from miles.utils.misc import exec_command
exec_command(f"ray job submit -- python3 train.py {words}")
"""


@pytest.fixture
def script(tmp_path):
    """A place for a script in a checkout."""
    for folder in ("miles/utils/external_utils", "scripts"):
        (tmp_path / folder).mkdir(parents=True)
    for package in ("miles", "miles/utils"):  # else Python finds the wheel of miles and imports torch
        (tmp_path / package / "__init__.py").touch()
    return tmp_path / "scripts/run.py"


@pytest.mark.parametrize(
    ("text", "limit_s", "line"),
    [
        ("import time; time.sleep(60)", 0.5, r" within 0\.5 s, got none"),
        ("1 / 0", 60, "got none: ZeroDivisionError: division by zero: provide what it lacks here, or start "),
        ("raise ValueError('two\\nlines.')", 60, "got none: ValueError: two lines: provide what"),
        ("raise SystemExit('no model')", 60, "got none: no model: provide what it lacks here, or start it"),
        (USAGE, 60, r"required: model: give what it lacks after --, or start it yourself, "),
        (HELP, 60, "got none: it ended with status 1: give what it lacks after --, or start it yourself, "),
        ("pass", 60, "got none: it ran no command with `ray job submit`: start it yourself, "),
        ("import os; os.system('rm -r /')", 60, "got none: PermissionError: the script itself would run"),
    ],
)
def test_a_script_that_submits_nothing_is_one_line(script, monkeypatch, text, limit_s, line):
    script.write_text(text)
    monkeypatch.setattr(python_script, "LIMIT_S", limit_s)
    with pytest.raises(ConfigError, match=rf"run\.py: expected a job that is submitted.*{line}"):
        python_script.command_of(str(script), [])


def test_a_script_imports_what_is_beside_it_as_python_does(script):
    (script.parents[1] / "miles/utils/misc.py").write_text(MISC)
    folder = script.parents[1] / "examples/one"
    folder.mkdir(parents=True)
    (folder / "beside.py").write_text("words = '--lr 1'\n")
    (folder / "run.py").write_text(SUBMITS)
    assert python_script.command_of(str(folder / "run.py"), []).endswith("train.py --lr 1")


@pytest.mark.parametrize(
    "call",
    [
        "subprocess.run(f'pkill x; {job}', shell=True)",
        "subprocess.run(['bash', '-c', job], check=True)",
        "subprocess.run(job.split())",
        "subprocess.run('pgrep x | kill', shell=True).check_returncode(); subprocess.run(job, shell=True)",
    ],
)
def test_a_job_that_the_script_itself_submits_is_noted(script, call):
    script.write_text(f"import subprocess; job = 'ray job submit -- python3 train.py --lr 1'; {call}")
    assert python_script.command_of(str(script), []).endswith("ray job submit -- python3 train.py --lr 1")


def test_a_command_whose_output_the_script_reads_is_refused(script):
    script.write_text("import subprocess; subprocess.run(['nproc'], capture_output=True)")
    with pytest.raises(ConfigError, match="PermissionError: the script itself would run nproc"):
        python_script.command_of(str(script), [])
