"""The shell command by which a Python launch script of miles would start its job, none of which is started.

The script runs with miles' own launcher utilities, of which the functions that run commands only note them;
any other way of starting or ending a process is refused.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from slime_ext.errors import ConfigError
from slime_ext.tools.folders import is_folder

UTILITIES = "miles/utils/external_utils"
REFUSED = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.kill", "os.killpg")
LIMIT_S = 120.0
RECORDER = """
import json, runpy, sys
from importlib import import_module
notes = []
def note(command, *args, **kwargs):
    notes.append(command)
    return "0"
for name in ("exec_command", "command_utils"):
    try:
        module = import_module("miles.utils.external_utils." + name)
    except ModuleNotFoundError:
        continue
    for function in [f for f in vars(module) if f.lstrip("_").startswith("exec_command")]:
        if callable(getattr(module, function)):
            setattr(module, function, note)
refused = json.loads(sys.argv[2])
def audit(event, args):
    if event in refused:
        raise PermissionError(f"the script itself would run {args[0] if args else event}")
sys.addaudithook(audit)
out, sys.argv = sys.argv[1], sys.argv[3:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    open(out, "w").write(json.dumps(notes))
"""


def command_of(path: str, given: Sequence[str]) -> str:
    """The command that submits the job.

    Args:
        given: flags of the script's own.

    Raises:
        ConfigError: the script lies in no checkout of miles, fails, or submits nothing in time.
    """
    from slime_ext_cpu.driver import SITE

    root = next((folder for folder in Path(path).resolve().parents if is_folder(folder / UTILITIES)), None)
    if root is None:
        raise ConfigError(f"{path}: expected a script in a checkout of miles, got no {UTILITIES} above it")
    with tempfile.NamedTemporaryFile(suffix=".json") as notes:
        command = [
            sys.executable,
            "-c",
            RECORDER,
            notes.name,
            json.dumps(REFUSED),
            str(Path(path).resolve()),
            *given,
        ]
        paths = [str(SITE), str(Path(__file__).parents[3]), str(root), str(root / "scripts")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "SLIME_EXT_WITHOUT_CUDA": "1"}
        try:
            run = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, cwd=root
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"{path}: expected a job that is submitted within {LIMIT_S:g} s, got none: the script is "
                "still at work, or waits"
            ) from None
        text = Path(notes.name).read_text()
    submitted = [line for line in json.loads(text or "[]") if "ray job submit" in line]
    if not submitted:
        said = [line.strip(" │") for line in run.stderr.splitlines() if any(map(str.isalnum, line))]
        last = said[-1] if said else "it ran no command with `ray job submit`"
        raise ConfigError(f"{path}: expected a job that is submitted, got none: {last}")
    return submitted[-1]
