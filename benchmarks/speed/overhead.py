"""Measures the cost of a call on a few tokens, where operations decide.

    python -m benchmarks.speed overhead

SkyRL reads padded tensors. Two columns have them prepared; another column is padding a host's lists. In the
last columns SkyRL does what the hook does: lists in, a flat loss out.
"""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.speed.cost import dispatched, minima
from benchmarks.speed.others import skyrl, skyrl_loss
from benchmarks.speed.run import ours
from benchmarks.speed.workloads import Batch

SHAPES = ((8, 64), (64, 64), (512, 16))  # sequences x tokens
FORMS = {"S": "sequence weights, geometric mask, veto", "T": "token weights"}
METRICS = "ours, all metrics"
Body = Callable[[Batch], object]


def contenders() -> dict[str, Body]:
    """Returns column -> what runs on a batch. Leaves SkyRL out if it is not installed."""
    columns: dict[str, Body] = {}
    for config, form in FORMS.items():
        bodies = ours(config)
        columns |= {f"ours: {form}": bodies["ours"], f"{METRICS}: {form}": bodies[METRICS]}
    try:
        columns |= {f"SkyRL: {FORMS[config]}": body for config, body in skyrl().items()}
        columns["SkyRL: padding"] = Batch.padded
        columns |= {f"SkyRL, lists to loss: {FORMS[config]}": body for config, body in skyrl_loss().items()}
    except ImportError as error:
        print(f"SkyRL: left out, {error}", file=sys.stderr)
    return columns


def table(repeat: int) -> Table:
    """Returns microseconds and dispatched operations of each contender on each shape."""
    bodies, shown = contenders(), Table(title=f"the fastest of {repeat} calls, µs, and dispatched operations")
    for column in ("sequences x tokens", *bodies):
        shown.add_column(column, justify="right")
    for sequences, tokens in SHAPES:
        batch = Batch.of([tokens] * sequences)
        calls = {name: functools.partial(body, batch) for name, body in bodies.items()}
        counts = {name: dispatched(call) for name, call in calls.items()}
        fastest = minima(calls, repeat)
        cells = (f"{fastest[name] * 1e6:.0f} µs, {counts[name]}" for name in calls)
        shown.add_row(f"{sequences} x {tokens}", *cells)
    return shown


def in_turns(repeat: int) -> Iterator[str]:
    """Yields microseconds of ours and of one column of SkyRL, which take turns with nothing else.

    In the table many contenders take turns, so each finds the processor's caches full of others' code.
    """
    bodies = contenders()
    padding = bodies.get("SkyRL: padding")
    for form in FORMS.values() if padding else ():
        batch = Batch.of([SHAPES[0][1]] * SHAPES[0][0])
        hook, to_loss, corrects = (
            functools.partial(bodies[f"{who}: {form}"], batch)
            for who in ("ours", "SkyRL, lists to loss", "SkyRL")
        )
        for name, theirs in {
            "from lists to a loss": to_loss,
            "padding, then correcting": lambda b=batch, corrects=corrects: (padding(b), corrects()),
        }.items():
            fastest = minima({"ours": hook, "SkyRL": theirs}, repeat)
            times = ", ".join(f"{who} {seconds * 1e6:.0f} µs" for who, seconds in fastest.items())
            yield f"in turns, {form}; SkyRL {name}: {times}"


def run(asked: Namespace) -> None:
    """Prints the table, and the times of pairs."""
    torch.set_num_threads(1)
    Console(width=170).print(table(asked.repeat))
    for line in in_turns(asked.repeat):
        print(line)
