"""Runs the passes of ``check`` for those who only need the lines, or the first mistake."""

from __future__ import annotations

from slime_ext.hosts.code import HostCode
from slime_ext.rules.judge import Verdict
from slime_ext.tools.check.lines import judged
from slime_ext.tools.check.setup import Use, case_of
from slime_ext.tools.launch.launch import Launch
from slime_ext.tools.launch.sources import sources_of


def check_launch(launch: Launch, host: HostCode | None = None) -> Verdict:
    """Returns the lines of the rules for a launch that was read.

    Raises:
        ConfigError: the first mistake.
    """
    return judged(case_of(sources_of(launch, host=host)))[1]


def check_file(path: str) -> None:
    """Raises ConfigError for a mistake in a YAML file that names something of slime_ext."""
    case = case_of(sources_of(Launch(""), path))
    if case.use is not Use.NONE:
        judged(case)
