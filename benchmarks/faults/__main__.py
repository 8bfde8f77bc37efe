"""Is each fault named, and nothing else? 35 faults x 5 seeds and 200 healthy runs of a small transformer,
each planted by its mechanism, written in slime's dump format and read as ``slime-ext analyze`` reads them.

    python -m benchmarks.faults [--out runs/faults.jsonl] [--seeds 5] [--healthy 200] [--only NAME]
    python -m benchmarks.faults --threads
    python -m benchmarks.faults --write runs/faults --only frozen_sampler --seeds 1

What was measured is kept in --out, line by line: a run that was broken off goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.faults.cases import ALSO, FAULTS, HEALTHY, THREADS, healthy
from benchmarks.faults.world import World, write
from slime_ext.tools.analysis.document import Document
from slime_ext.tools.analysis.request import Request
from slime_ext.tools.analysis.run import analyse


def main() -> int:
    """Runs what is missing and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("set", nargs="?", choices=["toy", "real", "figures", "table"], default="toy")
    parser.add_argument("--seed", type=int, help="of the real set: this one only")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--healthy", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0, help="100: none that thresholds were set on")
    parser.add_argument("--only", action="append", help="a fault, or 'healthy'")
    parser.add_argument("--threads", action="store_true", help="rebuild eight public threads instead")
    parser.add_argument(
        "--write", type=Path, metavar="DIR", help="write the dumps of --only and leave them there"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.set == "real":
        from benchmarks.faults import real

        return real.make(given)
    if given.set in ("figures", "table"):
        from benchmarks.faults import figures

        print(figures.table() if given.set == "table" else figures.write(given.out) or figures.FILE)
        return 0
    if given.threads:
        print(threads())
        return 0
    if given.write:
        for name, seed, world in _cases(given):
            print(f"slime-ext analyze {write(world, given.write / f'{name}_{seed}')}")
        return 0
    given.out = given.out or Path("runs/faults.jsonl")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    lines = given.out.read_text().splitlines() if given.out.exists() else []
    rows = {(row["planted"], row["seed"]): row for row in map(json.loads, lines)}
    with given.out.open("a") as file:
        for name, seed, world in _cases(given):
            if (name, seed) not in rows:
                rows[name, seed] = _measured(name, seed, world)
                print(json.dumps(rows[name, seed]), file=file, flush=True)
    print(table(list(rows.values())))
    return 0


def _cases(given: argparse.Namespace) -> Iterator[tuple[str, int, World]]:
    first = given.first_seed
    for name, world in FAULTS.items():
        if not given.only or name in given.only:
            yield from ((name, first + n, replace(world, seed=first + n)) for n in range(given.seeds))
    if not given.only or HEALTHY in given.only:
        yield from ((HEALTHY, first + n, healthy(first + n)) for n in range(given.healthy))


def _measured(name: str, seed: int, world: World) -> dict:
    begin = time.process_time()
    document = analysed(world)
    found = [finding.name for finding in document.findings if finding.severity != "note"]
    looked = Counter(row.state for row in document.detectors)
    return {
        "planted": name,
        "seed": seed,
        "found": found,
        "absolute": document.total.absolute,
        "looked": looked["found"] + looked["nothing"],
        "seconds": round(time.process_time() - begin, 2),
    }


def analysed(world: World) -> Document:
    """What ``slime-ext analyze`` says of a world."""
    with tempfile.TemporaryDirectory(prefix="slime_ext_faults_") as folder:
        request = Request((str(write(world, Path(folder))),))
        return analyse(request, request.files())


def is_named(row: dict) -> bool:
    """Whether the planted fault was found and nothing else, or nothing in a healthy run."""
    name, found = row["planted"], set(row["found"])
    return not found if name == HEALTHY else name in found <= {name, *ALSO.get(name, ())}


def table(rows: list[dict]) -> str:
    """The table of docs/analyze.md: how often each fault was named, exactly and alone."""
    lines = ["| planted | runs | named alone | mean \\|l\\|, nats | else |", "|---|---:|---:|---:|---|"]
    exact = total = 0
    for name in (*FAULTS, HEALTHY):
        own = [row for row in rows if row["planted"] == name]
        right = [row for row in own if is_named(row)]
        if not own:
            continue
        others = Counter(", ".join(row["found"]) or "nothing" for row in own if not is_named(row))
        said = "; ".join(f"{count} x {found}" for found, count in others.items())
        known = [row["absolute"] for row in own if row["absolute"] is not None]
        distance = f"{sum(known) / len(known):.2g}" if known else ""
        lines.append(f"| `{name}` | {len(own)} | {len(right)} | {distance} | {said} |")
        if name != HEALTHY:
            exact, total = exact + len(right), total + len(own)
    seconds = sum(row["seconds"] for row in rows)
    share = f"{exact} of {total} faults named alone ({exact / total:.1%}). " if total else ""
    return "\n".join([*lines, "", f"{share}{seconds:.0f} s of processor time."])


def threads() -> str:
    """The table of docs/analyze.md: what the page says of rebuilt threads."""
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


if __name__ == "__main__":
    raise SystemExit(main())
