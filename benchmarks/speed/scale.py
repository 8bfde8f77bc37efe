"""Measures how the cost grows with tokens, sequences and context-parallel ranks.

python -m benchmarks.speed scale
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.speed.cost import medians
from benchmarks.speed.run import STEPS, ours
from benchmarks.speed.workloads import Batch, slope
from slime_ext.config.load import load_config
from slime_ext.core.correction import HookInputs, apply
from slime_ext.core.tokens import Tokens
from slime_ext.host.packing import pack_segments
from slime_ext.host.ranks import Parallel

SEQUENCES = (1, 16, 256, 4096)
RANKS = (1, 2, 4)
LARGE = 10**6  # number of tokens from which the fixed cost of a call no longer shows
CONFIG = "S"


def over_tokens(most: int, repeat: int) -> Table:
    """Returns milliseconds from 10^4 tokens upwards, in 16 sequences."""
    sizes = [10**power for power in range(4, 9) if 10**power <= most]
    times = [_once([size // 16] * 16, repeat) for size in sizes]
    rows = zip(sizes, times, (t * 1e6 / n for t, n in zip(times, sizes, strict=True)), strict=True)
    large = max(len([n for n in sizes if n >= LARGE]), 2)
    fitted = slope(sizes[-large:], times[-large:])
    return _table("tokens", f"exponent {fitted:.2f} from {sizes[-large]:,} tokens up", rows)


def over_sequences(tokens: int, repeat: int) -> Table:
    """Returns milliseconds for the same tokens in more and more sequences."""
    times = [_once([tokens // count] * count, repeat) for count in SEQUENCES]
    rows = zip(SEQUENCES, times, (t / times[0] for t in times), strict=True)
    return _table(
        "sequences", f"{tokens} tokens; exponent {slope(list(SEQUENCES), times):.2f}", rows, "times 1"
    )


def over_ranks(tokens: int, repeat: int) -> Table:
    """Returns processor milliseconds per rank for the same tokens, cut as slime cuts them."""
    times = []
    for ranks in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (ranks, folder, tokens, repeat)
            torch.multiprocessing.spawn(_rank, arguments, nprocs=ranks)
            times.append(max(float(path.read_text()) for path in Path(folder).glob("time*")))
    rows = zip(RANKS, times, (t / times[0] for t in times), strict=True)
    return _table(
        "ranks", f"{tokens} tokens, gloo; exponent {slope(list(RANKS), times):.2f}", rows, "times 1"
    )


def _once(sizes: list[int], repeat: int) -> float:
    batch, called = Batch.of(sizes), ours(CONFIG)["ours"]
    return medians({"ours": lambda: called(batch)}, repeat)["ours"]


def _rank(rank: int, ranks: int, folder: str, tokens: int, repeat: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)

    def all_sum(values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values)
        return values

    lengths = [tokens // 16] * 16
    masks = [torch.ones(n, dtype=torch.int32) for n in lengths]
    times = []
    configured = load_config({"steps": STEPS[CONFIG]})
    cut = functools.partial(pack_segments, masks, lengths, lengths, here=Parallel(rank, ranks, all_sum))
    proximal = -torch.rand(cut().size)
    for _ in range(repeat + 1):
        dist.barrier()
        begin = time.process_time()
        apply(configured, HookInputs(Tokens(cut(), proximal, proximal + 1e-4), -proximal))
        times.append((time.process_time() - begin) * 1e3)
    Path(folder, f"time{rank}").write_text(str(statistics.median(times[1:])))
    dist.destroy_process_group()


def _table(what: str, title: str, rows: object, last: str = "ns per token") -> Table:
    shown = Table(what, "processor ms", last, title=title)
    for size, milliseconds, more in rows:
        shown.add_row(f"{size:,}", f"{milliseconds:.3g}", f"{more:.3g}")
    return shown


def run(asked: Namespace) -> None:
    """Prints three tables."""
    torch.set_num_threads(1)
    console = Console(width=100)
    console.print(over_tokens(asked.most, asked.repeat))
    console.print(over_sequences(asked.tokens, asked.repeat))
    console.print(over_ranks(asked.tokens, asked.repeat))
