"""Runs tests_gpu, and times the hook, a host's policy loss, score centering and a training step. Writes a
table and a JSON file.

    bash benchmarks/cuda.sh [--out DIR] [--slime DIR] [--verl DIR] [--skyrl DIR] [--dry-run]

Each step is a separate process with a time limit, together 8 minutes. Its results stay if the next step
crashes or is cut off. ``--dry-run`` runs all steps on a CPU with small batches.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.on_cuda import timing
from benchmarks.on_cuda.timing import Row

ROOT = Path(__file__).parents[2]
SECONDS = {"tests": 80, "hook": 110, "host": 130, "center": 25, "train": 115}  # limits of the steps
PATIENT = 4  # times these limits in a dry run, because a CPU that others use pays for no device
SPARE = 20  # seconds at the end of a step's limit, in which no contender begins but one may finish
NUMBERS = "ms", "launches", "waits", "peak MB", "times the copy", "times mis.py", "share of a step"
HEAD = "what", "tokens", "", *NUMBERS, ""
OUTCOME = re.compile(r" (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b")
SYSTEMS = "slime", "verl", "skyrl"
PLACES = "out", "wheels", *SYSTEMS


def step(command: Sequence[str], seconds: float, log: Path) -> str:
    """Runs a process with its log in a file. Returns what went wrong; "" if nothing did."""
    begin = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", *command],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"cut off after {time.monotonic() - begin:.0f} s"
        finally:
            _end(process)
    last = (log.read_text(errors="replace").strip().splitlines() or ["nothing said"])[-1]
    return "" if status == 0 else f"exit status {status}: {last[:300]}"


def _end(process: subprocess.Popen) -> None:
    """Ends a step and all processes that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def run_tests(log: Path) -> tuple[dict[str, int], str]:
    """Runs tests_gpu. Returns outcome -> number of tests, and what went wrong."""
    words = ["pytest", "tests_gpu", "-v", "-p", "no:cacheprovider", "--no-header", "-rs"]
    wrong = step(words, SECONDS["tests"], log)
    text = log.read_text(errors="replace")
    if wrong.startswith("exit status 5"):  # no test was collected, because each file skips as a whole
        wrong = ""
    return dict(Counter(match.lower() for match in OUTCOME.findall(text))), wrong


def machine(device: str) -> dict[str, str]:
    """Describes the machine on which the figures were measured."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}


def unmet(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each faulty row: left out although it should run, or waiting."""
    return [
        f"{row.what}, {row.contender}: {row.why or f'waits {row.waits} times for the device'}"
        for row in rows
        if row.why or (row.waits and (row.contender.startswith("ours") or row.what.startswith("policy loss")))
    ]


def markdown(report: dict, rows: Sequence[Row]) -> str:
    """Returns the report: machine, tests, and one row for each measurement."""
    place, tests = report["machine"], ", ".join(f"{n} {what}" for what, n in report["tests"].items())
    lines = [
        f"# The hook on {place['device']} (PyTorch {place['torch']}, Python {place['python']})",
        "",
        f"tests_gpu: {tests or 'nothing ran'}. {report['seconds']:.0f} s in all.",
        "",
        f"| {' | '.join(HEAD)} |",
        "|---|---:|---|" + "---:|" * len(NUMBERS) + "---|",
    ]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    return "\n".join([*lines, "", *(f"WRONG: {line}" for line in report["wrong"])]) + "\n"


def _cells(row: Row) -> list[str]:
    numbers = [(row.milliseconds, ".3f"), (row.launches, "d"), (row.waits, "d"), (row.peak_mb, ".1f")]
    numbers += [(row.times_copy, ".1f"), (row.times_mis, ".1f"), (row.share, ".2%")]
    shown = ["-" if value is None else format(value, how) for value, how in numbers]
    return [row.what, str(row.tokens), row.contender, *shown, row.why]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="benchmarks/cuda.sh", description=__doc__.splitlines()[0])
    made.add_argument("--out", type=Path, default=Path("runs/cuda"), help="folder of cuda.md and cuda.json")
    made.add_argument(
        "--wheels", type=Path, default=ROOT / "cuda-wheels", help="folder of the wheel miles-rl"
    )
    made.add_argument("--cwd", type=Path, default=Path.cwd(), help="folder at which relative paths start")
    for system in SYSTEMS:
        made.add_argument(f"--{system}", type=Path, metavar="DIR", help=f"a checkout of {system}")
    made.add_argument("--dry-run", action="store_true", help="run all steps on a CPU with small batches")
    return made


def measure(asked: argparse.Namespace, device: str, out: Path) -> tuple[list[Row], list[str]]:
    """Runs the timed steps. Returns their rows, and what went wrong."""
    beside = [str(folder) for folder in (asked.verl, asked.skyrl) if folder]
    slime = str(asked.slime) if asked.slime else None
    words = {
        "hook": [*(["--slime", slime] if slime else []), *(["--beside", *beside] if beside else [])],
        "host": [*(["--host", slime] if slime else []), "--wheels", str(asked.wheels)],
        "center": ["--slime", slime] if slime else [],
        "train": [*(["--host", slime] if slime else []), "--wheels", str(asked.wheels)],
    }
    rows, wrong = [], []
    for name, more in words.items():
        lines = out / f"{name}.jsonl"
        lines.unlink(missing_ok=True)
        seconds = SECONDS[name] * (PATIENT if asked.dry_run else 1)
        common = ["--lines", str(lines), "--seconds", str(seconds - SPARE), "--device", device]
        failed = step([f"benchmarks.on_cuda.{name}", *common, *more], seconds, out / f"{name}.log")
        rows += timing.read(lines)
        wrong += [f"{name}: {failed}: see {out / name}.log"] if failed else []
        print(f"{name}: {failed or 'done'}", flush=True)
    return rows, wrong + unmet(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs everything, and writes the table and the JSON file. Returns 1 if something is wrong."""
    asked = parser().parse_args(argv)
    if not asked.dry_run and not torch.cuda.is_available():
        return _refused("expected a CUDA device, got none: add --dry-run to run on the CPU")
    for name in PLACES:
        if folder := getattr(asked, name):
            setattr(asked, name, asked.cwd / folder)
    for name in SYSTEMS:
        if (folder := getattr(asked, name)) and not folder.is_dir():
            return _refused(f"--{name}: expected a folder, got {folder}: check the path")
    device, begin, out = "cpu" if asked.dry_run else "cuda", time.monotonic(), asked.out
    out.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine(device)}
    report["tests"], failed = run_tests(out / "tests.log")
    print(f"tests_gpu: {report['tests']} {failed}", flush=True)
    rows, wrong = measure(asked, device, out)
    report |= {"wrong": [f"tests_gpu: {failed}"] * bool(failed) + wrong}
    report |= {"rows": [asdict(row) for row in rows], "seconds": time.monotonic() - begin}
    text = markdown(report, rows)
    (out / "cuda.md").write_text(text)
    (out / "cuda.json").write_text(json.dumps(report, indent=1) + "\n")
    print(text, f"\nwritten to {out}/cuda.md and cuda.json", sep="")
    return 1 if report["wrong"] else 0


def _refused(why: str) -> int:
    print(f"benchmarks/cuda.sh: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
