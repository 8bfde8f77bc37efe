"""Finds the shell command with which a Python launcher would start its job.

The launcher of slime or miles runs with this user's rights, because nothing else tells what it would start.
The functions of the host's launcher utilities that run commands are replaced: they only note the command, so
no job starts. ``subprocess.run`` without output does, too. This is no sandbox.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

from slime_ext.errors import ConfigError
from slime_ext.tools.folders import is_folder

UTILITIES = tuple(f"{host}/utils/external_utils" for host in ("miles", "slime"))
REFUSED = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.kill", "os.killpg")
LIMIT_S = 120.0
WIDE = "1000"  # columns of the screen that it prints on
MOST = 300  # characters of its error in a message
BY_HAND = "start it yourself, save the command that it prints after EXEC: as run.sh, and check run.sh"
RECORDER = """
import json, logging, os, runpy, shlex, subprocess, sys
from importlib import import_module
logging.disable()  # so that the last line of stderr is the script's error
commands, error, is_usage = [], "", False
def note(command, *args, **kwargs):
    commands.append(command)
    return "0"
for name in ("utils.misc", "utils.external_utils.exec_command", "utils.external_utils.command_utils"):
    try:
        module = import_module(sys.argv[3] + "." + name)
    except ModuleNotFoundError:
        continue
    for function in [f for f in vars(module) if f.lstrip("_").startswith("exec_command")]:
        if callable(getattr(module, function)):
            setattr(module, function, note)
def run(words, *args, **kwargs):
    if args or not OUTPUT.isdisjoint(kwargs):  # what the script does next depends on what the command prints
        return subprocess_run(words, *args, **kwargs)
    is_bash = not isinstance(words, str) and [*words[:2]] == ["bash", "-c"]
    commands.append(words[2] if is_bash else words if isinstance(words, str) else shlex.join(map(str, words)))
    return subprocess.CompletedProcess(words, 0)
OUTPUT = {"capture_output", "stdout", "stderr"}
subprocess_run, subprocess.run = subprocess.run, run
refused = json.loads(sys.argv[2])
def audit(event, args):
    if event in refused:
        raise PermissionError(f"the script itself would run {args[0] if args else event}")
sys.addaudithook(audit)
out, sys.argv = sys.argv[1], sys.argv[4:]
sys.path[0] = os.path.dirname(sys.argv[0])  # as `python run.py` does
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    if end.code not in (None, 0):
        is_usage = isinstance(end.code, int)
        error = f"it ended with status {end.code}" if is_usage else str(end.code)
except BaseException as raised:
    error = f"{type(raised).__name__}: {raised}"
finally:
    json.dump([commands, error, is_usage], open(out, "w"))
"""


def forbid(path: str) -> None:
    """Raises ConfigError for a Python launcher, because reading it means running it."""
    raise ConfigError(
        f"{path}: expected a shell script, got a Python launcher, which has to be executed: add --run to "
        f"execute it with your rights; or {BY_HAND}"
    )


def command_of(path: str, arguments: Sequence[str]) -> str:
    """Runs a Python launcher and returns the command that submits its job.

    Args:
        arguments: the launcher's flags.

    Raises:
        ConfigError: the launcher is not in a checkout of slime or miles, fails, or submits nothing in time.
    """
    from slime_ext_cpu.driver import SITE

    above = ((folder, name) for folder in Path(os.path.realpath(path)).parents for name in UTILITIES)
    root, name = next(((folder, name) for folder, name in above if is_folder(folder / name)), (None, ""))
    if root is None:
        got = f"no {' or '.join(UTILITIES)} above it"
        raise ConfigError(f"{path}: expected a script in a checkout of slime or miles, got {got}")
    with tempfile.NamedTemporaryFile(suffix=".json") as notes:
        command = [
            sys.executable,
            "-c",
            RECORDER,
            notes.name,
            json.dumps(REFUSED),
            name.partition("/")[0],
            str(Path(path).resolve()),
            *arguments,
        ]
        paths = [str(SITE), str(Path(__file__).parents[3]), str(root), str(root / "scripts")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "SLIME_EXT_WITHOUT_CUDA": "1"}
        environment |= {"COLUMNS": WIDE, "TERMINAL_WIDTH": WIDE}  # so that typer prints an error on one line
        try:
            run = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, cwd=root
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"{path}: expected a job that is submitted within {LIMIT_S:g} s, got none: remove what "
                "the script computes or waits for"
            ) from None
        text = Path(notes.name).read_text()
    commands, error, is_usage = json.loads(text or "[[], null, false]")
    submitted = [line for line in commands if "ray job submit" in line]
    if submitted:
        return str(submitted[-1])
    printed = [line.strip(" │") for line in run.stderr.splitlines() if any(map(str.isalnum, line))]
    if error is None or (is_usage and printed):  # argparse and typer print what they miss, and exit
        error = printed[-1] if printed else f"it ended with status {run.returncode}"
    if is_usage:
        what = f"give what it lacks after --, or {BY_HAND}"
    elif error:
        what = f"provide what it lacks here, or {BY_HAND}"
    else:
        error, what = "it ran no command with `ray job submit`", BY_HAND
    got = textwrap.shorten(error, MOST, placeholder="...").rstrip(";:. ")
    raise ConfigError(f"{path}: expected a job that is submitted, got none: {got}: {what}")
