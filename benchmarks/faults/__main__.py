"""Faults, each planted by its mechanism, in slime's dump format.

python -m benchmarks.faults real --out DIR [--only NAME] [--seed N]   # in SmolLM2: the dumps, as zips
python -m benchmarks.faults figures --out DIR                         # what detectors read of them
python -m benchmarks.faults table                                     # what is named
python -m benchmarks.faults toy --out DIR --only NAME [--seed N]      # in a toy transformer: a folder
python -m benchmarks.faults threads                                   # eight public threads, rebuilt
python -m benchmarks.faults pictures --out docs/img                   # of docs/analyze.md, with Chromium
python -m benchmarks.faults mechanism --out DIR --only NAME [--seed N] # one of judge's runs: a folder
python -m benchmarks.faults judge [--only NAME] [--seed N] [--jobs N] # faults by mechanism: what is said
    [--dumps DIR]                                                   # those of mechanism, where they are made
    [--rows FILE] [--results benchmarks/faults/RESULTS.md]          # goes on where it stopped; fills the page
python -m benchmarks.faults report --out DIR --only NAME [--seed N]   # one of reports' runs: a folder
python -m benchmarks.faults kind --out DIR --only NAME --seed N       # a healthy run; "window": lagging ones
python -m benchmarks.faults reports [--set first|later|third|fourth]  # mechanisms that no detector knew
    [--unseen] [--seed N] [--only NAME] [--jobs N] [--rows FILE]    # goes on where it stopped
    [--against FILE] [--dumps DIR]                                  # before and now
python -m benchmarks.faults honest [--count N]                        # identities of healthy runs
python -m benchmarks.faults explains [--only NAME] [--dumps DIR]       # shares of k3, beside those planted
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.faults import explains, figures, honest, judge, outside, pictures, real
from benchmarks.faults.cases import FAULTS, HEALTHY, THREADS, healthy
from benchmarks.faults.kinds import KINDS, SEEDS, WINDOWS, window, write_kind, write_lagging
from benchmarks.faults.mechanisms import CASES, Runs
from benchmarks.faults.outside import ALL_REPORTS, WINDOW
from benchmarks.faults.reports import REPORTS, SEEN, runs_of, write_report
from benchmarks.faults.world import World, write
from slime_ext.tools.analysis.document import Document
from slime_ext.tools.analysis.request import Request
from slime_ext.tools.analysis.run import analyse


def main() -> int:
    """Makes what is asked for, and prints a table or what to do next."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=list(COMMANDS))
    parser.add_argument("--out", type=Path, default=Path("runs/faults"))
    parser.add_argument("--only", action="append", choices=NAMES, metavar="NAME")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--dumps", type=Path)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--unseen", action="store_true")
    parser.add_argument("--set", choices=list(outside.SETS), default=outside.FIRST)
    parser.add_argument("--count", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(COMMANDS[options.what](options))
    return 0


def mechanisms(out: Path, names: list[str], seed: int) -> str:
    """Writes the dumps of faults by mechanism; returns how to look at them."""
    runs = Runs(seed)
    folders = [judge.make(name, seed, runs, out / f"{name}_{seed}") for name in names]
    return "\n".join(f"slime-ext analyze {folder}" for folder in folders)


def reports(out: Path, names: list[str], seed: int) -> str:
    """Writes the dumps of public reports; returns how to look at them."""
    runs = runs_of(seed)
    folders = [write_report(ALL_REPORTS[name], runs, out / f"{name}_{seed}") for name in names]
    return "\n".join(f"slime-ext analyze {folder}" for folder in folders)


def healthy_kinds(out: Path, names: list[str], seed: int) -> str:
    """Writes the dumps of healthy runs of some kinds, or windows; returns how to look at them."""
    folders = [write_kind(name, seed, out / f"{name}_{seed}") for name in names if name != WINDOW]
    if WINDOW in names:
        whole = write_lagging(seed, out / f"lagging_{seed}")
        folders += [window(whole, number, out / f"{WINDOW}_{seed}_{number}") for number in range(WINDOWS)]
    return "\n".join(f"slime-ext analyze {folder}" for folder in folders)


def toy(out: Path, names: list[str], seed: int) -> str:
    """Writes the dumps of toy worlds; returns how to look at them."""
    worlds = {name: healthy(seed) if name == HEALTHY else replace(FAULTS[name], seed=seed) for name in names}
    folders = [write(world, out / f"{name}_{seed}") for name, world in worlds.items()]
    return "\n".join(f"slime-ext analyze {folder}" for folder in folders)


def write_pictured(folder: Path) -> None:
    """Writes the runs of the pictures."""
    for name, seed in pictures.RUNS:
        toy(folder, [name], seed)


def analysed(world: World) -> Document:
    """What ``slime-ext analyze`` says of a world."""
    with tempfile.TemporaryDirectory(prefix="slime_ext_faults_") as folder:
        request = Request((str(write(world, Path(folder))),))
        return analyse(request, request.files())


def threads() -> str:
    """The table of RESULTS.md: what the page says of rebuilt threads."""
    lines = ["| thread | what was seen | rebuilt as | what the page says |", "|---|---|---|---|"]
    for name, (seen, rebuilt, world) in THREADS.items():
        document = analysed(world)
        could = sum(row.state in ("found", "nothing") for row in document.detectors)
        looked = f"{could} of {len(document.detectors)} detectors looked and found nothing; mean \\|l\\| "
        said = "<br>".join(
            f"`{f.name}`: {f.title} {f.evidence}".replace("|log-ratio|", "\\|log-ratio\\|")
            for f in document.findings
        )
        repository, number = name.split("#")
        link = f"[{name}](https://github.com/{repository}/issues/{number})"
        lines.append(
            f"| {link} | {seen} | {rebuilt} | {said or f'{looked}{document.total.absolute:.2g} nats'} |"
        )
    return "\n".join(lines)


COMMANDS = {
    "real": lambda options: real.make(options.out, options.only, options.seed),
    "figures": lambda options: figures.write(options.out),
    "table": lambda options: figures.table(),
    "toy": lambda options: toy(options.out, options.only or list(FAULTS), options.seed or 0),
    "threads": lambda options: threads(),
    "pictures": lambda options: pictures.draw(options.out, write_pictured),
    "mechanism": lambda options: mechanisms(options.out, options.only or list(CASES), options.seed or 0),
    "report": lambda options: reports(
        options.out, options.only or list(REPORTS), SEEN[0] if options.seed is None else options.seed
    ),
    "kind": lambda options: healthy_kinds(
        options.out, options.only or list(KINDS), SEEDS[0] if options.seed is None else options.seed
    ),
    "honest": lambda options: honest.table(options.count),
    "reports": lambda options: outside.judge_reports(
        options.only,
        options.unseen,
        options.seed,
        options.set,
        options.jobs,
        options.rows,
        options.against,
        options.dumps,
    ),
    "judge": lambda options: judge.judge(
        options.only, options.seed, options.jobs, options.rows, options.results, options.dumps
    ),
    "explains": lambda options: explains.explains(options.only, options.seed, options.dumps),
}
NAMES = sorted({*real.NAMES, *FAULTS, *CASES, *ALL_REPORTS, *KINDS, WINDOW, HEALTHY})


if __name__ == "__main__":
    raise SystemExit(main())
