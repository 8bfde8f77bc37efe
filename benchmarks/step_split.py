"""Where the time of a rollout step goes, from the metrics of a finished run.

    python -m benchmarks.step_split runs/tiny

Medians over the rollouts after the first five (the engine's caches are cold before).
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

from slime_ext.launcher.output.metrics_log import read_metrics

PARTS = {
    "sampling": "perf/rollout_time",
    "packing": "perf/pack_time",
    "proximal forward": "perf/proximal_forward_time",
    "training (all optimizer steps)": "perf/train_time",
    "of which the hook": "perf/hook_time",
    "weight sync": "perf/weight_sync_time",
    "dump": "perf/dump_time",
    "whole rollout step": "perf/step_time",
}


def medians(run: Path, skip: int = 5) -> dict[str, float]:
    """Seconds per part."""
    rows = [row for row in read_metrics(run) if row["kind"] == "rollout"][skip:]
    return {name: statistics.median(row[key] for row in rows) for name, key in PARTS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, nargs="+")
    for run in parser.parse_args().run:
        seconds = medians(run)
        table = Table("part", "seconds", "share of the step", title=str(run))
        for name, value in seconds.items():
            table.add_row(name, f"{value:.4f}", f"{value / seconds['whole rollout step']:.2%}")
        Console().print(table)


if __name__ == "__main__":
    main()
