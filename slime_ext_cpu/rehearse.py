"""Runs ``slime-ext rehearse run.sh``: two small rollouts of a launch on the CPU."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from slime_ext.tools.commands.script_flags import EPILOG, apart
from slime_ext_cpu.rehearsal.run import TIMEOUT_S


def command_line() -> argparse.ArgumentParser:
    """Returns the parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog="slime-ext rehearse", description="Rehearses a launch script of slime or miles without a GPU."
    )
    parser.add_argument("script", help="launch script: .sh, or .py of miles")
    parser.add_argument(
        "--host", help="'miles' for the wheel, or a checkout; default: the checkout that contains the script"
    )
    parser.add_argument("--out", type=Path, help="folder of the run; default: a new folder below runs")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=TIMEOUT_S,
        help=f"stop the run after so many seconds; default: {TIMEOUT_S:g}",
    )
    what = "let the script see this variable of your shell (repeat for others); it sees no others"
    parser.add_argument("--env", action="append", default=[], metavar="NAME", help=what)
    parser.epilog = EPILOG
    return parser


def main(argv: list[str]) -> int:
    """Prints the page of a rehearsal. Returns 0, or 1 if a line of the page is wrong.

    Raises:
        ConfigError: a mistake in the script, before the run starts.
    """
    words, arguments = apart(argv)
    options = command_line().parse_args(words, argparse.Namespace(arguments=arguments))

    from slime_ext_cpu.rehearsal.main import rehearse  # imports torch, which takes two seconds

    return rehearse(options)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if (number := float(text)) > 0:  # NaN is not
            return number
    raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text}")
