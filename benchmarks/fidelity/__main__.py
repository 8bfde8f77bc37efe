"""``slime-ext bench fidelity``: exact bias and variance of corrections."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

from slime_ext import presets
from slime_ext.config.files import read_mapping
from slime_ext.errors import ConfigError
from slime_ext.tools.commands.output import PlainConsole, console

SPEED = "speed is measured from a checkout: python -m benchmarks.speed against, or scale"


def main(argv: Sequence[str]) -> int:
    """Prints the tables of ``bench fidelity [PRESET ...]``, or with ``--page`` the page of all methods."""
    given = _parser().parse_args(argv)
    for name in given.preset:
        presets.find(name)  # raises at a mistake before any table is computed
    files = [(file, read_mapping(file)) for file in given.config]
    if given.page and (given.preset or files):
        raise ConfigError(
            "bench fidelity --page: expected no preset and no --config beside it, got some: the page has its "
            "own list of methods"
        )

    import torch
    from rich.progress import track

    from slime_ext.tools import fidelity_page
    from slime_ext.tools.analysis.measures.user_corrections import load_user_corrections
    from slime_ext.tools.fidelity import tables

    torch.set_num_threads(1)  # tensors of a dozen numbers: threads wait for each other
    errors = console(stderr=True)
    shown = functools.partial(
        track, description="", transient=True, console=errors, disable=not errors.is_terminal
    )
    if given.page:
        print(fidelity_page.page(seed=given.seed, under_way=shown), end="")
        return 0
    chosen = {name: presets.get(name) for name in given.preset}
    chosen |= {name: own.correction for name, own in load_user_corrections(files).items()}
    for name, correction in chosen.items():
        if correction.needs_ages:
            raise ConfigError(f"{name}: expected no max_staleness, got one: nothing has an age here")
    for table in tables(chosen, given.seed, shown):
        PlainConsole(highlight=False, width=80).print(table)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="slime-ext bench", epilog=SPEED, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    fidelity = commands.add_parser(
        "fidelity", help="exact bias and variance of every preset, nothing sampled"
    )
    fidelity.add_argument("preset", nargs="*", help="all that do not couple samples, if none is named")
    fidelity.add_argument(
        "--config", action="append", default=[], metavar="FILE", help="a correction of your own, a file"
    )
    fidelity.add_argument(
        "--page", action="store_true", help="docs/what_each_method_does.md, with long responses; minutes"
    )
    fidelity.add_argument("--seed", type=int, default=0, help="of the random policies")
    return parser
