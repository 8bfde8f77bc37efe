"""Reads a launch script of slime or miles and returns its ``Launch``.

A separate process reads the script, so that it can be ended whatever it waits for, and so that a crash of the
sandbox does not end this process.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from slime_ext.config.files import text_of
from slime_ext.errors import ConfigError, SlimeExtError, cut
from slime_ext.tools.folders import is_file, is_folder
from slime_ext.tools.launch import python_script
from slime_ext.tools.launch.launch import Launch
from slime_ext.tools.launch.surroundings import Request
from slime_ext.tools.launch.trace import MAPPING
from slime_ext.tools.launch.visible import RESERVED

PYTHON = ".py"
SCRIPT = (".sh", ".bash", ".zsh", ".ksh", ".slurm", ".sbatch", PYTHON, "")
LIMIT_S = 20.0
READER = """
import sys
sys.path[:] = sys.argv[1:]  # not the working directory
from slime_ext.tools.launch import reader
reader.main()
"""


def is_script(path: str) -> bool:
    """Whether a file is a launch script and not a YAML or JSON file."""
    suffix = Path(path).suffix
    return suffix in SCRIPT or (suffix not in MAPPING and _names_a_shell(path))


def _names_a_shell(path: str) -> bool:
    try:
        return is_file(path) and text_of(path).startswith("#!")
    except ConfigError:
        return False


def host_root(path: str) -> Path | None:
    """Returns the checkout of slime or miles that contains a file, or None."""
    for folder in Path(os.path.realpath(path)).parents:
        if is_file(folder / "train.py") and any(is_folder(folder / kind) for kind in ("slime", "miles")):
            return folder
    return None


def request_of(
    path: str,
    arguments: Sequence[str] = (),
    checkout: Path | None = None,
    *,
    run: bool = False,
    environment: Iterable[str] = (),
) -> Request:
    """Builds the request to read a script.

    Args:
        arguments: the arguments of the script, ``$@`` in bash.
        checkout: the host's checkout that stands for the container's; by default the script's checkout.
        run: whether a Python launcher may be executed.
        environment: names of the variables of this process that the script may see.

    Raises:
        ConfigError: a Python launcher may not be executed or submits no job, or a variable is not set.
    """
    variables = {name: _variable(name) for name in environment}
    is_python = Path(path).suffix == PYTHON
    if is_python and not run:
        python_script.forbid(path)
    root, above = host_root(path), Path(os.path.realpath(path)).parents
    repository = next((folder for folder in above if (folder / ".git").exists()), None)
    return Request(
        path,
        text=python_script.command_of(path, arguments) if is_python else None,
        arguments=tuple(arguments),
        root=root,
        own_folder=root or repository or Path(path).absolute().parent,
        here=Path.cwd(),
        checkout=checkout or root,
        variables=variables,
        others=frozenset(os.environ) - variables.keys(),
    )


def _variable(name: str) -> str:
    text = os.environ.get(name)
    if text is None:
        raise ConfigError(f"--env: expected a variable that is set here, got {cut(name)}: export it first")
    if RESERVED.search(text):
        raise ConfigError(f"--env: expected a value without private characters, got {cut(name)}: unset it")
    return text


def read_script(
    path: str,
    arguments: Sequence[str] = (),
    checkout: Path | None = None,
    *,
    run: bool = False,
    environment: Iterable[str] = (),
) -> Launch:
    """Returns the launch of a script. The launch has no program and no flags if the script starts none.

    Args:
        arguments, checkout, run, environment: as for ``request_of``.

    Raises:
        ConfigError: the script cannot be read in time, ends its launch too early, or does not pass its flags
            on.
    """
    return in_reader(request_of(path, arguments, checkout, run=run, environment=environment))


def in_reader(request: Request) -> Launch:
    """Reads a script in a separate process. Raises ConfigError as ``read_script``."""
    path, folders = request.path, [str(Path(__file__).parents[3]), *filter(None, sys.path)]
    command, sent = [sys.executable, "-S", "-c", READER, *folders], pickle.dumps(request)
    try:
        reader = subprocess.run(command, input=sent, capture_output=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        got = "a longer one: remove commands that compute or wait"
        raise ConfigError(f"{path}: expected a script that is read within {LIMIT_S:g} s, got {got}") from None
    if reader.returncode:
        last = reader.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        got = f"signal {-reader.returncode}" if reader.returncode < 0 else cut(last.partition(":")[0])
        what = "look for a part that calls itself or is nested too deeply"
        raise ConfigError(f"{path}: expected a script that can be read, got {got} from its reader: {what}")
    answer: Launch | SlimeExtError = pickle.loads(reader.stdout)
    if isinstance(answer, SlimeExtError):
        raise answer
    return answer


def read_launch(
    path: str, arguments: Sequence[str] = (), host: str | None = None, environment: Iterable[str] = ()
) -> Launch:
    """Returns the launch of a script that must start a host.

    Executes a Python launcher.

    Args:
        arguments, environment: as for ``request_of``.
        host: the host's checkout; by default the checkout that contains the script.

    Raises:
        ConfigError: as ``read_script``, or the script launches nothing.
    """
    launch = read_script(
        path, arguments, Path(host) if host and is_folder(host) else None, run=True, environment=environment
    )
    return check_launched(launch, path)


def check_launched(launch: Launch, path: str) -> Launch:
    """Returns a launch that starts a host.

    Raises:
        ConfigError: the script starts none.
    """
    if launch.program:
        return launch
    what = "; ".join(launch.notes) or "check the script that starts train.py"
    raise ConfigError(f"{path}: expected a launch of slime or miles, got none: {what}")
