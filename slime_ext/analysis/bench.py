"""``slime-ext bench``: tables that anyone can print again."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Runs ``bench fidelity [PRESET ...] [--seed N]``, ``bench speed`` or ``bench scale``."""
    words = list(argv)
    if words[:1] == ["speed"]:
        from slime_ext.analysis.speed import run

        return run.main(words[1:])
    if words[:1] == ["scale"]:
        from slime_ext.analysis.speed import scale

        return scale.main(words[1:])
    return _fidelity(words)


def _fidelity(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="slime-ext bench", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("speed", help="time against other systems, by backend and workload", add_help=False)
    commands.add_parser("scale", help="time against tokens, sequences and ranks", add_help=False)
    fidelity = commands.add_parser(
        "fidelity", help="exact bias and variance of every preset, nothing sampled"
    )
    fidelity.add_argument("preset", nargs="*", help="all that do not couple samples, if none is named")
    fidelity.add_argument("--seed", type=int, default=0, help="of the random policies")
    args = parser.parse_args(list(argv))

    from rich.console import Console

    from slime_ext.analysis.fidelity import table

    Console(width=160).print(table(args.preset, args.seed))
    return 0
