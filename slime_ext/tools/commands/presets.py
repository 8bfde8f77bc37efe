"""Runs ``slime-ext presets``: prints the table of presets.

``slime-ext presets NAME`` prints one preset as YAML and as plain torch. ``slime-ext presets --for KIND``
prints the presets for a kind of run, and what to do in such a run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from slime_ext.errors import ConfigError, check_known
from slime_ext.tools import decision
from slime_ext.tools.commands.lazy_torch import load_later

# Kind of run -> the rows of the decision table that may apply to it.
KINDS = {
    "async": (decision.LAGGING,),
    "moe": (decision.NEAR, decision.FAR),
    "long": (decision.NEAR, decision.FAR),
    "int4": (decision.ROUNDED,),
}


def command_line() -> argparse.ArgumentParser:
    """Returns the flags of the command."""
    parser = argparse.ArgumentParser(prog="slime-ext presets", description="Lists corrections by name.")
    parser.add_argument(
        "name", nargs="?", help="preset to print: formula, risk, source, flags, keys and plain torch"
    )
    parser.add_argument(
        "--for",
        dest="kind",
        metavar="KIND",
        help=f"print only the presets for a kind of run: {', '.join(KINDS)}",
    )
    help_out = (
        "write the file for --custom-config-path; if FILE ends in .py, write the function in plain torch"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help=help_out)
    return parser


def main(argv: list[str]) -> int:
    """Prints the table or one preset, or writes a preset's file or function."""
    args = command_line().parse_args(argv)
    if args.name is not None and args.kind is not None:
        raise ConfigError(
            f"--for {args.kind}: expected no NAME beside it, got {args.name}: leave out one of the two"
        )
    if args.kind is not None:
        check_known("--for", "kind of run", args.kind, KINDS)
    if args.name is None and args.out is not None:
        raise ConfigError(
            "--out: expected the NAME of a preset, got none: type slime-ext presets NAME --out FILE"
        )

    if args.name is None:
        from slime_ext.tools.commands import preset_list

        preset_list.print_table(args.kind, KINDS.get(args.kind, ()))
        return 0

    load_later()  # torch, which takes two seconds
    from slime_ext.tools.commands import preset_texts

    if args.out is None:
        preset_texts.print_preset(args.name)
    else:
        is_torch = args.out.suffix == ".py"
        text = (preset_texts.function_named if is_torch else preset_texts.text_of)(args.name)
        _write(args.out, text + "\n")
    return 0


def _write(path: Path, text: str) -> None:
    """Writes a file that does not exist, or that has the same text."""
    try:
        if path.is_file() and path.read_bytes() != text.encode():
            raise ConfigError(
                f"--out {path}: expected a new file, got one with other content: choose another name, or "
                "remove the file"
            )
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"--out {path}: expected a file to write, got {error.strerror}") from None
