"""Runs ``slime-ext report DIR...``: draws reward, mismatch, ratios, clipping and staleness of runs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from slime_ext.errors import ConfigError
from slime_ext.tools.commands.output import plain
from slime_ext.tools.folders import is_folder, make_folder


def command_line() -> argparse.ArgumentParser:
    """Returns the flags of the command."""
    parser = argparse.ArgumentParser(
        prog="slime-ext report",
        description="Draws runs of slime, miles or `slime-ext train` into one picture. Reads TensorBoard "
        "events and off_policy.jsonl below each folder.",
    )
    parser.add_argument(
        "folders",
        nargs="+",
        metavar="DIR",
        help="folder of a run, or of several runs, which are seeds of one setting",
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="picture to write; default: report.png in the first folder"
    )
    parser.add_argument(
        "--labels",
        nargs="+",
        metavar="NAME",
        default=(),
        help="one name per folder; folders with equal names are seeds of one setting",
    )
    return parser


def main(argv: list[str]) -> int:
    """Draws the picture and prints its path."""
    args = command_line().parse_args(argv)

    from slime_ext.tools.report.run_picture import PICTURES, draw  # imports torch, which takes two seconds

    if args.labels and len(args.labels) != len(args.folders):
        raise ConfigError(
            f"--labels: expected one name per folder ({len(args.folders)}), got {len(args.labels)}: "
            "type as many names as folders"
        )
    out = args.out or Path(args.folders[0]) / "report.png"
    if out.suffix not in PICTURES:
        raise ConfigError(f"--out: expected a name that ends in {', '.join(PICTURES)}, got {out}")
    if not args.out and is_folder(out.parent) and not os.access(out.parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{out.parent}: expected a folder to write {out.name} to, got a folder that this user may not "
            "write to: type --out FILE"
        )
    try:
        if args.out:
            make_folder(out.parent)
        print(plain(draw(args.folders, out, args.labels)))
    except OSError as error:
        raise ConfigError(
            f"{error.filename or out}: expected a file to read or write, got {error.strerror}"
        ) from error
    return 0
