"""Times commands of two checkouts, interleaved.

    python -m benchmarks.tools OTHER [NAME ...] [--rounds 5] [--busy N]

OTHER is a second checkout, for example of an earlier commit (``git worktree add --detach OTHER COMMIT``).
Each row of ``ROWS`` runs as a command in both, in turns, so that both see the same load of the machine.
The table has the median user time of this checkout and of the other one, their ratio, and the row's target.

Threads that wait for each other in loops spend user time, the more the fewer cores are free. With
``--busy N`` N other processes take cores, as on a machine that somebody uses.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.analyze_scale import generate

HERE = Path(__file__).resolve().parents[1]
OURS = "--custom-megatron-init-path slime_ext.host.init --use-tis --custom-tis-function-path"
SCRIPT = f"""
MODEL_ARGS=(--num-layers 36 --hidden-size 2560)
GRPO_ARGS=(--advantage-estimator grpo --kl-loss-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28)
TIS_ARGS=({OURS} slime_ext.tis.token_tis)
ray job submit --runtime-env-json='{{"env_vars": {{"A": "1"}}}}' -- python3 train.py ${{MODEL_ARGS[@]}} \\
   ${{GRPO_ARGS[@]}} ${{TIS_ARGS[@]}} --rollout-batch-size 32 --n-samples-per-prompt 8
"""
VERL = "rollout_correction: {rollout_is: token, rollout_is_threshold: 2.0}\n"


class Row(NamedTuple):
    """A command to time.

    Args:
        words: the words after ``slime-ext``; files are relative to the folder that ``prepare`` fills.
        target: the largest ratio to the other checkout that the row should have.
        prepare: writes the input files into an empty folder.
    """

    words: str
    target: float
    prepare: Callable[[Path], object] = lambda folder: None


def _script(folder: Path) -> None:
    (folder / "run.sh").write_text(SCRIPT)
    lines = [line for line in SCRIPT.splitlines() if not line.startswith("TIS_ARGS")]
    (folder / "off.sh").write_text("\n".join(lines).replace("${TIS_ARGS[@]}", ""))


def _verl(folder: Path) -> None:
    (folder / "verl.yaml").write_text(VERL)


def _dumps(rollouts: int, tokens: int) -> Callable[[Path], object]:
    """Returns what writes a run of so many rollouts, of so many response tokens each, into ``run``."""
    return lambda folder: generate(folder / "run", rollouts, tokens)


def _short(folder: Path) -> None:
    """Writes 64 rollouts of 512 samples of 10 to 32 tokens as JSONL, 36 MB."""
    g = torch.Generator().manual_seed(0)
    with (folder / "run.jsonl").open("w") as file:
        for i in range(64 * 512):
            count = int(torch.randint(10, 33, (1,), generator=g))
            behavior = -torch.empty(count).exponential_(2.0, generator=g)
            proximal = behavior + 0.02 * torch.randn(count, generator=g)
            line = {"rollout_id": i // 512, "group_index": i // 8, "reward": float(i % 2), "prompt": "prompt"}
            line |= {"rollout_log_probs": behavior.tolist(), "log_probs": proximal.tolist()}
            line |= {"advantages": i % 2 - 0.5, "response": "word " * count}
            file.write(json.dumps(line) + "\n")


ROWS = {
    "check, ours": Row("check run.sh", 0.2, _script),
    "check, without ours": Row("check off.sh", 0.2, _script),
    "presets": Row("presets", 0.2),
    "presets NAME": Row("presets token_tis", 0.2),
    "analyze, 64 rollouts of 512 short samples": Row("analyze run.jsonl", 0.25, _short),
    "analyze, 9 rollouts, 921,600 tokens": Row("analyze run", 0.5, _dumps(9, 102_400)),
    "analyze, 40 rollouts, 36.9M tokens": Row("analyze run", 0.25, _dumps(40, 922_500)),
    "analyze, as make train, 4,096 tokens": Row("analyze run", 0.4, _dumps(16, 256)),
    "convert FILE": Row("convert --from verl verl.yaml", 0.2, _verl),
}


BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keeps so many other processes busy."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def seconds(checkout: Path, words: list[str], folder: Path) -> float:
    """Runs a command of a checkout once and returns its user seconds, with those of its children."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONPYCACHEPREFIX": str(folder / "compiled")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # because pip compiles a package that it installs
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    run = subprocess.run(
        [sys.executable, "-m", "slime_ext", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode not in (0, 1):  # 1 is an answer of a command that judges
        raise SystemExit(f"{checkout}: slime-ext {' '.join(words)}: {run.stderr[-2000:]}")
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def medians(name: str, other: Path, rounds: int) -> tuple[float, float]:
    """Returns the median seconds of a row here and in the other checkout."""
    row, here, there = ROWS[name], list[float](), list[float]()
    with tempfile.TemporaryDirectory() as place:
        row.prepare(Path(place))
        for i in range(rounds + 1):
            pair = [seconds(checkout, row.words.split(), Path(place)) for checkout in (HERE, other)]
            if i:  # the first round fills the caches of the disk and of Python
                here.append(pair[0])
                there.append(pair[1])
    return statistics.median(here), statistics.median(there)


def main() -> None:
    """Prints a table of the named rows, or of all rows."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tools", description="Times commands of two checkouts."
    )
    parser.add_argument("other", type=Path, metavar="OTHER", help="the second checkout")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"rows: {', '.join(ROWS)}; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each command that count")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="other processes that are busy")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in ROWS]:
        parser.error(f"NAME: expected one of {', '.join(ROWS)}, got {unknown[0]}")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    machine += f", others that are busy: {args.busy}"
    table = Table("command", "here, s", "other, s", "ratio", "target", box=None, title=machine)
    for name in args.names or ROWS:
        with busy(args.busy):
            here, there = medians(name, args.other.resolve(), args.rounds)
        target = ROWS[name].target
        table.add_row(name, f"{here:.2f}", f"{there:.2f}", f"{here / there:.2f}", f"{target:g}")
    Console().print(table)


if __name__ == "__main__":
    main()
