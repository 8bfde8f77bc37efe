"""What share of an optimizer step the hook takes, with and without metrics, in the embedded launcher.

    python -W ignore -m benchmarks.hook_share [--samples 512 --steps 4 --rounds 9]

Trains the model of configs/tiny on the same random rollout under each setting, interleaved in one process.
"""

from __future__ import annotations

import statistics
import time

from rich.console import Console
from rich.table import Table

from benchmarks.proximal_forward import interleaved, options, trainer
from slime_ext.launcher.megatron.step import Trainer
from slime_ext.launcher.training_data import TrainSample

HOOK = ["--use-tis", "--custom-tis-function-path", "slime_ext.tis.decoupled_geo_rs_seq_tis"]
MODES = {
    "no metrics": {"enabled": False},
    "metrics without curves": {"curves": "none"},
    "metrics and curves": {"curves": "log"},
}


def once(trained: Trainer, samples: list[TrainSample]) -> tuple[float, float]:
    """Seconds of one rollout's optimizer steps, and of the hook in them."""
    cut = trained.cut(samples)
    proximal = trained.proximal(cut)
    start, hook = time.perf_counter(), 0.0
    for index, step in enumerate(cut):
        _, log = trained.train_step(step, proximal, index)
        hook += log.hook_seconds
    return time.perf_counter() - start, hook


def main() -> None:
    chosen = options(__doc__)

    def make(name: str) -> Trainer:
        made = trainer(chosen.samples, chosen.steps, HOOK)
        made.args.slime_ext = {"metrics": MODES[name]}
        return made

    times = interleaved(chosen, MODES, make, once)
    table = Table("", "optimizer step, ms", "hook, ms", "share")
    for name, taken in times.items():
        step, hook = (statistics.median(values) * 1e3 / chosen.steps for values in zip(*taken, strict=True))
        table.add_row(name, f"{step:.1f}", f"{hook:.2f}", f"{hook / step:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
