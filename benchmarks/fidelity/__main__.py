"""Computes exact bias and variance of corrections: ``python -m benchmarks.fidelity``."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterable, Sequence

import torch
from rich.progress import track

from benchmarks.fidelity import exact, page, picture
from slime_ext import presets
from slime_ext.config.files import read_mapping
from slime_ext.core.correction import Correction
from slime_ext.core.needs import ANY_AGE, Need, require
from slime_ext.errors import ConfigError, SlimeExtError
from slime_ext.tools.analysis.measures.user_corrections import load_user_corrections
from slime_ext.tools.commands.output import PlainConsole, console

USER_ERROR = 2


def main(argv: Sequence[str]) -> int:
    """Prints the tables of presets, prints RESULTS.md or draws the figures. Returns 2 for a mistake."""
    options = _parser().parse_args(argv)
    try:
        _print(options)
    except SlimeExtError as error:
        print(f"benchmarks.fidelity: {error}", file=sys.stderr)
        return USER_ERROR
    return 0


def _print(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # because tensors have a dozen numbers, and threads would wait for each other
    errors = console(stderr=True)
    shown = functools.partial(
        track, description="", transient=True, console=errors, disable=not errors.is_terminal
    )
    if options.results or options.figures:
        _print_all(options, shown)
        return
    for table in exact.tables(_chosen(options), options.seed, shown):
        PlainConsole(highlight=False, width=80).print(table)


def _print_all(options: argparse.Namespace, shown: Callable[[list], Iterable]) -> None:
    """Prints RESULTS.md, draws the figures, or both."""
    if options.preset or options.config:
        flag = "--results" if options.results else "--figures"
        raise ConfigError(f"{flag}: expected no preset and no --config beside it, got some: leave them out")
    if options.results:
        print(page.results(seed=options.seed, under_way=shown), end="")
    if options.figures:
        picture.write(shown)


def _chosen(options: argparse.Namespace) -> dict[str, Correction]:
    """Returns the named presets and files. Raises for a mistake, before any table is computed."""
    chosen = {name: presets.find(name).correction for name in options.preset}
    files = [(file, read_mapping(file)) for file in options.config]
    chosen |= {name: loaded.correction for name, loaded in load_user_corrections(files).items()}
    for name, correction in chosen.items():
        require(correction.needs, frozenset(Need) - ANY_AGE, name, "samples have no age here")
    return chosen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fidelity",
        description="Prints the exact bias and variance of corrections. Nothing is sampled.",
        allow_abbrev=False,
    )
    parser.add_argument("preset", nargs="*", help="presets to evaluate; default: all that couple no samples")
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE", help="file of a correction to evaluate, too"
    )
    parser.add_argument("--results", action="store_true", help="print RESULTS.md, which takes minutes")
    parser.add_argument(
        "--figures", action="store_true", help="draw the figures of docs/what_each_method_does.md"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random policies")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
