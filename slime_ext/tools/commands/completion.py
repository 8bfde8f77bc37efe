"""Runs ``slime-ext completion SHELL``: prints a script that completes commands and flags after TAB."""

from __future__ import annotations

import argparse
import importlib

from slime_ext.errors import check_known
from slime_ext.tools.commands import cli

SHELLS = ("bash", "zsh", "tcsh")
# Metavars, or dests, of arguments that are paths.
PATHS = ("FILE", "FILE.html", "DIR", "PATH", "SCRIPT", "file", "script", "host", "out")


def command_line() -> argparse.ArgumentParser:
    """Returns the flags of the command."""
    parser = argparse.ArgumentParser(
        prog="slime-ext completion",
        description="Prints a script that completes commands, flags, names and paths after TAB.",
        epilog='For bash, type: eval "$(slime-ext completion bash)". For zsh, save the output as _slime-ext '
        "in a folder of $fpath.",
    )
    parser.add_argument("shell", metavar="SHELL", help=", ".join(SHELLS))
    return parser


def main(argv: list[str]) -> int:
    """Prints the script for a shell."""
    shell = command_line().parse_args(argv).shell
    check_known("command line", "shell", shell, SHELLS)

    import shtab

    print(shtab.complete(whole_command_line(), shell=shell))
    return 0


def whole_command_line() -> argparse.ArgumentParser:
    """Returns every command with the flags of its module's ``command_line``."""
    import shtab

    parser = argparse.ArgumentParser(prog="slime-ext")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers()
    names = _names()
    for name, text in cli.COMMANDS.items():
        flags = importlib.import_module(cli.module_of(name)).command_line()
        for action in flags._actions:  # argparse has no public list of a parser's arguments
            action.choices = names.get((name, action.dest), action.choices)
            if (action.metavar or action.dest) in PATHS:
                action.complete = shtab.FILE
        commands.add_parser(name, help=text, parents=[flags], add_help=False)
    return parser


def _names() -> dict[tuple[str, str], tuple[str, ...]]:
    """Returns (command, dest) -> names, for arguments whose parser does not list the names."""
    from slime_ext import presets
    from slime_ext.tools.commands.presets import KINDS
    from slime_ext.tools.convert import CONVERTED

    return {
        ("presets", "name"): tuple(sorted(presets.NAMES)),
        ("presets", "kind"): tuple(KINDS),
        ("convert", "system"): tuple(CONVERTED),
        ("train", "correction"): tuple(sorted(presets.NAMES)),
        ("completion", "shell"): SHELLS,
    }
