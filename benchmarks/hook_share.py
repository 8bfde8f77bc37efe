"""What share of an optimizer step the hook takes, with and without metrics, in the embedded launcher.

    python -W ignore benchmarks/hook_share.py [--samples 512 --steps 4 --rounds 9]

Trains the model of configs/tiny on the same random rollout under each setting, interleaved in one process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.proximal_forward import rollout, trainer
from slime_ext.launcher.megatron import parallel

HOOK = ["--use-tis", "--custom-tis-function-path", "slime_ext.tis.decoupled_geo_rs_seq_tis"]
MODES = {
    "no metrics": {"enabled": False},
    "metrics without curves": {"curves": "none"},
    "metrics and curves": {"curves": "log"},
}


def once(trained, samples) -> tuple[float, float]:
    """Seconds of one rollout's optimizer steps, and of the hook in them."""
    cut = trained.cut(samples)
    proximal = trained.proximal(cut)
    start, hook = time.perf_counter(), 0.0
    for index, step in enumerate(cut):
        _, log = trained.train_step(step, proximal, index)
        hook += log.hook_seconds
    return time.perf_counter() - start, hook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        sizes = dict.fromkeys(("tensor", "pipeline"), 1)
        first = argparse.Namespace(context_parallel_size=1, seed=0)
        vars(first).update({f"{name}_model_parallel_size": size for name, size in sizes.items()})
        parallel.initialize(first)
        trainers = {}
        for name, metrics in MODES.items():
            trainers[name] = trainer(options.samples, options.steps, HOOK)
            trainers[name].args.slime_ext = {"metrics": metrics}
        samples = rollout(options.samples)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in MODES}
        for index in range(options.rounds):
            for name in list(MODES)[:: 1 if index % 2 else -1]:
                times[name].append(once(trainers[name], samples))
        parallel.destroy()
    table = Table("", "optimizer step, ms", "hook, ms", "share")
    for name, taken in times.items():
        step, hook = (statistics.median(values) * 1e3 / options.steps for values in zip(*taken, strict=True))
        table.add_row(name, f"{step:.1f}", f"{hook:.2f}", f"{hook / step:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
