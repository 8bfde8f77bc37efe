"""Times corrections against each other in one interleaved run.

    python -m benchmarks.speed against

Compare ratios, not milliseconds, because milliseconds differ between machines.

Configuration T is token weights with a cap of 2; S is sequence weights with a cap, a geometric mask, a veto
and metrics. Systems that are not installed are left out.
"""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.speed.cost import Cost, count, medians
from benchmarks.speed.others import SYSTEMS, of_slime
from benchmarks.speed.workloads import Batch, floor, lengths_of
from slime_ext import tis
from slime_ext.config.load import load_config
from slime_ext.core.metrics.layout import MetricsLayout
from slime_ext.host import step_metrics

GEO = {"low": 0.999, "high": 1.001}
STEPS = {
    "T": [{"reweight": {"level": "token"}}, {"truncate": {"high": 2.0}}],
    "S": [
        {"reweight": {"level": "sequence"}},
        {"truncate": {"high": 2.0}},
        {"reject": {"unit": "sequence", "statistic": "ratio", "aggregate": "mean"} | GEO},
        {"veto": {"low": 1e-4}},
    ],
}
FLOOR = "floor (C, one pass)"
Body = Callable[[Batch], object]


def ours(config: str) -> dict[str, Body]:
    """Returns the hook as slime calls it, with lists in and lists out.

    The contenders return metrics to the host only, collect all metrics of an optimizer step, or also curves.
    """
    # One function each, because a function reads its configuration again if its args are new.
    hook = {"T": tis.token_tis, "S": tis.correct}[config]
    args = SimpleNamespace(use_tis=True, slime_ext={"steps": STEPS[config]})
    correction = load_config({"steps": STEPS[config]})

    def called(batch: Batch, layout: MetricsLayout | None) -> object:
        with nullcontext() if layout is None else step_metrics.under_way(step_metrics.OptimizerStep(layout)):
            return hook(args, **batch.call())

    return {
        "ours": lambda b: called(b, None),
        "ours, all metrics": lambda b: called(b, MetricsLayout.of(correction, curves=False)),
        "ours, all metrics and curves": lambda b: called(b, MetricsLayout.of(correction)),
    }


def contenders(config: str, slime: str | None, device: str = "cpu") -> dict[str, Body]:
    """Returns name -> function of a batch on a device. The floor exists only for CPUs."""
    bodies = ours(config)
    loaders = ({FLOOR: lambda: {config: floor(config)}} if device == "cpu" else {}) | SYSTEMS
    if slime:
        loaders |= {"slime mis.py": lambda: mis(slime), "slime vanilla_tis": lambda: vanilla(slime)}
    for name, load in loaders.items():
        try:
            loaded = load()
            bodies |= {name: loaded[config]} if config in loaded else {}
        except ImportError as error:
            print(f"{name}: left out, {error}", file=sys.stderr)
    return bodies


def mis(folder: str) -> dict[str, Body]:
    """Returns slime's example helper from a checkout."""
    sys.path[:0] = [folder, str(Path(folder, "examples", "train_infer_mismatch_helper"))]
    import mis as helper

    common = {"tis_lower_bound": 0.5, "tis_upper_bound": 2.0, "tis_mode": "truncate"}
    common |= {"use_tis": True, "rs_lower_bound": 0.999, "rs_upper_bound": 1.001, "rs_veto_threshold": 1e-4}
    common |= {"tis_batch_normalize": False}
    token = SimpleNamespace(**common, use_rs=False, tis_level="token", rs_level="geometric")
    sequence = SimpleNamespace(**common, use_rs=True, tis_level="sequence", rs_level="geometric")

    def weights(args: SimpleNamespace, batch: Batch) -> object:
        train, rollout, masks = _lists(batch)
        return helper.compute_mis_weights(
            args, train_log_probs=train, rollout_log_probs=rollout, loss_masks=masks
        )

    return {"T": functools.partial(weights, token), "S": functools.partial(weights, sequence)}


def vanilla(folder: str) -> dict[str, Body]:
    """Returns slime's own token weights."""
    name = "vanilla_tis_function"
    function = of_slime(folder, "backends/megatron_utils/loss.py", name, Any=object)[name]
    args = SimpleNamespace(tis_clip_low=0.0, tis_clip=2.0)

    def weights(batch: Batch) -> object:
        train, rollout, masks = _lists(batch)
        return function(
            args, pg_loss=batch.host_loss, train_log_probs=train, rollout_log_probs=rollout, loss_masks=masks
        )

    return {"T": weights}


def _lists(batch: Batch) -> tuple[list, ...]:
    call = batch.call()
    return call["train_log_probs"], call["rollout_log_probs"], call["loss_masks"]


def interleaved(
    bodies: dict[str, Body], batches: dict[str, Batch], repeat: int
) -> dict[str, dict[str, float]]:
    """Returns workload -> contender -> milliseconds.

    All workloads of a contender run one after the other in each round, so they can be compared, too.
    """
    calls = {(w, k): functools.partial(v, batch) for k, v in bodies.items() for w, batch in batches.items()}
    milliseconds = medians(calls, repeat)
    return {w: {k: milliseconds[w, k] for k in bodies} for w in batches}


def table(config: str, milliseconds: dict[str, dict[str, float]], costs: dict[str, Cost | None]) -> Table:
    """Returns a row per contender: milliseconds on each workload, and multiples of the floor."""
    shown = Table(title=f"configuration {config}: processor ms (times the floor)")
    columns = ("operations", "waits", "MB", "peak MB")
    for column in ("", *milliseconds, *columns):
        shown.add_column(column)
    for name in next(iter(milliseconds.values())):
        cells = [_cell(times[name], times.get(FLOOR)) for times in milliseconds.values()]
        cost = costs.get(name)
        more = [f"{value:.3g}" for value in cost] if cost else ["-"] * len(columns)
        shown.add_row(name, *cells, *more)
    return shown


def _cell(milliseconds: float, under: float | None) -> str:
    return f"{milliseconds:.3g}" if under is None else f"{milliseconds:.3g} ({milliseconds / under:.1f})"


def _counted(name: str, body: Body, batch: Batch) -> Cost | None:
    """Returns the cost of one call; None for the floor, because machine code dispatches nothing."""
    return None if name == FLOOR else count(lambda: body(batch))


def run(asked: Namespace) -> None:
    """Prints the tables."""
    torch.set_num_threads(1)
    batches = {name: Batch.of(lengths_of(name)) for name in asked.workloads}
    for config in asked.configs:
        bodies = contenders(config, asked.slime_dir)
        milliseconds = interleaved(bodies, batches, asked.repeat)
        last = batches[asked.workloads[-1]]
        costs = {name: _counted(name, body, last) for name, body in bodies.items()}
        Console(width=160).print(table(config, milliseconds, costs))
    print(
        f"operations, waits, MB moved, MB of new tensors at once: one call on workload {asked.workloads[-1]}"
    )
