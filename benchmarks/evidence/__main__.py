"""Executes the runs that have no line yet, and makes tables and pictures.

    python -m benchmarks.evidence run lm_lag [--arms B C] [--seeds 1 2] [--out runs/evidence] [--commit]
    python -m benchmarks.evidence run lm_lag --seeds 101 --try lag=4 lr=1e-4   # a pilot of other settings
    python -m benchmarks.evidence run lm_lag --arms C --seeds 5 --again          # repeat a run
    python -m benchmarks.evidence run lm_rate --arms C@3e-5 --seeds 101          # a variant
    python -m benchmarks.evidence table        # evidence.yaml of the package, and the pages' tables
    python -m benchmarks.evidence pooled       # each pair of arms, over panels that differ in seeds alone
    python -m benchmarks.evidence picture

`run` executes one run after the other, seed by seed. You can stop it at any time and start it again, also on
another machine, because a run with a line in rows.jsonl is not started again. settings.yaml has the settings.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.evidence import rows, runs, settings
from slime_ext.errors import ConfigError, SlimeExtError, check_known


def main(argv: list[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evidence", description=__doc__.splitlines()[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="execute the runs of a panel that have no line yet")
    run.add_argument("panel", choices=settings.read().panels)
    run.add_argument("--arms", nargs="+", help="arms, or cells arm@variant; default: all of the panel")
    run.add_argument("--seeds", nargs="+", type=int, help="seeds; default: the panel's test seeds")
    run.add_argument(
        "--try", nargs="+", default=[], metavar="NAME=VALUE", dest="tried", help="settings of a pilot"
    )
    run.add_argument("--again", action="store_true", help="repeat finished runs, into again.jsonl")
    run.add_argument("--out", type=Path, default=Path("runs/evidence"), help="folder for the logs")
    run.add_argument("--keep", action="store_true", help="keep dumps and last checkpoint (2 GB a run)")
    run.add_argument("--commit", action="store_true", help="commit each line as it is written")
    commands.add_parser("table", help="write evidence.yaml of the package, and the tables of the pages")
    commands.add_parser("pooled", help="compare each pair of arms over panels that differ only in seeds")
    commands.add_parser("picture", help="draw gains.png and evidence*.png in docs/img")
    options = parser.parse_args(argv)
    if options.command == "run":
        return _run(options)
    from benchmarks.evidence import pages, picture, pooled

    if options.command == "pooled":
        print(pooled.report(settings.read(), rows.read()))
        return 0
    (pages if options.command == "table" else picture).write(settings.read(), rows.read())
    return 0


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _cells(of: settings.Settings, panel: str, asked: list[str] | None) -> list[str]:
    """Returns the cells that --arms names, by default all of the panel.

    Raises:
        ConfigError: an unknown arm or cell.
    """
    for name in asked or ():
        check_known("--arms", "arm", name, [*of.arms, *of.panels[panel].cells])
    return of.panels[panel].asked(asked or of.panels[panel].cells)


def _run(options: argparse.Namespace) -> int:
    tried = {name: _value(value) for name, _, value in (one.partition("=") for one in options.tried)}
    of = settings.read().with_tried(options.panel, tried)
    panel = of.panels[options.panel]
    seeds = options.seeds or list(panel.seeds)
    try:
        arms = _cells(of, options.panel, options.arms)
        runs.refuse(of, options.panel, seeds, rows.read())
        done = rows.read() + rows.read(rows.PILOTS)
        # checked after each run, because its line can also belong to another cell
        left: Iterable[tuple[str, int]] = runs.missing(of, options.panel, arms, seeds, done)
        if options.again:
            without = set(left)
            left = [(arm, seed) for seed in seeds for arm in arms if (arm, seed) not in without]
            if not left:
                raise ConfigError(
                    f"--again: expected recorded runs of {options.panel}, got none of these arms and seeds: "
                    "leave out --again"
                )
        for arm, seed in left:
            row = runs.run(of, options.panel, arm, seed, options.out, done, keep=options.keep)
            row = row.model_copy(update={"tried": tried or None})
            done.append(row)
            file = rows.AGAIN if options.again else rows.FILE if seed in panel.seeds else rows.PILOTS
            rows.append(row, file)
            if options.commit:
                runs.commit_line(row, file)
            print(f"{row.panel} {row.arm} seed {row.seed}: {row.end:.3f} in {row.seconds:.0f} s", flush=True)
    except SlimeExtError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
