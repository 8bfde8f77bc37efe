"""Runs the passes of ``check``, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from slime_ext.errors import ConfigError, cut
from slime_ext.hosts.code import HostCode
from slime_ext.tools.check.answer import Answer, answer_of
from slime_ext.tools.check.lines import judged
from slime_ext.tools.check.setup import Use, case_of
from slime_ext.tools.launch.launch import Launch
from slime_ext.tools.launch.read import is_script, read_script


def check(
    path: str,
    args_path: str | None = None,
    arguments: Sequence[str] = (),
    host: HostCode | None = None,
    *,
    run: bool = False,
    environment: Sequence[str] = (),
) -> Answer:
    """Checks a launch script or a YAML file.

    Args:
        path: the launch script or the YAML file.
        args_path: the launch script whose other arguments go with a YAML ``path``.
        arguments: the arguments of the script.
        host: the code that the launch will run; by default the checkout whose train.py it starts.
        run: whether a Python launcher may be executed.
        environment: names of the variables that the script may see.

    Raises:
        ConfigError: the first mistake.
    """
    # Which of the paths is the script.
    if not path:
        raise ConfigError("FILE: expected a launch script or a YAML file, got an empty name: name a file")
    script = next((file for file in (path, args_path) if file and is_script(file)), "")
    if args_path and not script:
        raise ConfigError(f"--args: expected a launch script, got {cut(args_path)}: write --args run.sh")
    if args_path and script == path:
        raise ConfigError(
            f"--args: expected a YAML file before it, got the script {cut(path)}: leave out --args"
        )
    if arguments and not script:
        raise ConfigError(
            f"{path}: expected no flags after -- with a YAML file, got {cut(arguments[0])}: leave them out"
        )

    # The passes.
    launch = read_script(script, arguments, run=run, environment=environment) if script else Launch("")
    if script and not launch.program:
        got = f"none: {'; '.join(launch.notes) or 'check the script that starts train.py'}"
        raise ConfigError(f"{script}: expected a launch of slime or miles, got {got}")
    case = case_of(launch, "" if path == script else path, host)
    return answer_of(*judged(case))


def check_launch(launch: Launch, host: HostCode | None = None) -> Answer:
    """Checks a launch that was read. Raises ConfigError as ``check``."""
    return answer_of(*judged(case_of(launch, host=host)))


def check_file(path: str) -> None:
    """Raises ConfigError for a mistake in a YAML file that names something of slime_ext."""
    case = case_of(Launch(""), path)
    if case.use is not Use.NONE:
        judged(case)
