"""Flags of the commands that read a launch script."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

OWN = "Words behind -- are flags of the script's own."


def add_flags_of_reading(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say what a script may see, and whether one may be executed."""
    what = "let the script see this variable (again for another); what others hold is not known"
    parser.add_argument("--env", action="append", default=[], metavar="NAME", help=what)
    what = "execute a Python launcher, with your rights, and read the job that it would submit"
    parser.add_argument("--run", action="store_true", help=what)
    parser.epilog = OWN


def apart(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command, and those behind ``--``, which are another program's.

    >>> apart(["run.sh", "--", "--lr", "1"])
    (['run.sh'], ['--lr', '1'])
    """
    end = list(words).index("--") if "--" in words else len(words)
    return list(words[:end]), list(words[end + 1 :])
