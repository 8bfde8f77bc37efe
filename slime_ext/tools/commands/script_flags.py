"""Adds the flags of all commands that read a launch script."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

EPILOG = "Words after -- are passed to the script as its arguments."


def add_flags_of_reading(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say what a script may see, and whether it may run."""
    what = "let the script see this variable; repeat for more; the values of all others stay unknown"
    parser.add_argument("--env", action="append", default=[], metavar="NAME", help=what)
    what = "execute a Python launcher, with your rights, and read the job that it would submit"
    parser.add_argument("--run", action="store_true", help=what)
    parser.epilog = EPILOG


def apart(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits words into those before and after ``--``; the latter are for the script.

    >>> apart(["run.sh", "--", "--lr", "1"])
    (['run.sh'], ['--lr', '1'])
    """
    end = list(words).index("--") if "--" in words else len(words)
    return list(words[:end]), list(words[end + 1 :])
