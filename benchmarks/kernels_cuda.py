"""The Triton kernels on a CUDA device against a device copy of the same bytes, and against the eager path.

    PYTHONPATH=. python benchmarks/kernels_cuda.py [--repeat 50]

Beside each call stands a copy that moves as many bytes as the call must read and write once. The device is
kept busy while a call is queued, so that its time is the device's own; what the host needs to queue it is
given apart.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from slime_ext.analysis.speed.run import OURS
from slime_ext.analysis.speed.workloads import Batch
from slime_ext.correction import Tokens
from slime_ext.kernels import Work, backend_for
from slime_ext.metrics import Layout
from slime_ext.ops.segments import Segments

SHAPES = {
    "32k in 8": [4096] * 8,
    "512k in 64": [8192] * 64,
    "512k in 4096": [128] * 4096,
    "1M in 1": [1 << 20],
    "8M in 64": [131072] * 64,
}
# Bytes a token: two log-probs and a mask read, a weight and two flags written; or the loss read too,
# and its product, the factor, three of the host's metrics and one flag written.
OUTCOME, APPLIED = 9 + 6, 13 + 21
BUSY = 20_000_000  # cycles, about 10 ms: longer than queueing any call takes


def microseconds(body: Callable[[], object], repeat: int) -> tuple[float, float]:
    """Median time on the device, and on the host until the call is queued."""
    device, host = [], []
    for _ in range(repeat + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY)
        start.record()
        begun = time.perf_counter()
        body()
        host.append((time.perf_counter() - begun) * 1e6)
        end.record()
        torch.cuda.synchronize()
        device.append(start.elapsed_time(end) * 1e3)
    return statistics.median(device[5:]), statistics.median(host[5:])


def copying(size: int) -> Callable[[], object]:
    """A copy that reads and writes ``size`` bytes in all."""
    here = torch.empty(size // 2, dtype=torch.uint8, device="cuda")
    there = torch.empty_like(here)
    return lambda: there.copy_(here)


def bodies(sizes: list[int]) -> dict[str, tuple[Callable[[], object], int]]:
    """name -> one call, and the bytes that it must move per token."""
    batch, correction = Batch.of(sizes), OURS["S"]
    mask = batch.flat_mask.bool().cuda()
    values = [x.cuda() for x in (batch.flat_proximal, batch.flat_behavior)]
    loss = batch.host_loss.detach().cuda().requires_grad_()
    work = Work(Tokens(Segments.whole(sizes, mask), *values), loss)

    def fresh() -> Work:
        return replace(work, tokens=Tokens(Segments.whole(sizes, mask), *values))

    found: dict[str, tuple[Callable[[], object], int]] = {}
    for name in ("triton", "eager"):
        backend = backend_for(correction, "cuda", name)
        found[f"{name}, weights and masks"] = lambda b=backend: b.outcome(fresh().tokens), OUTCOME
        found[f"{name}, loss and the host's metrics"] = lambda b=backend: b.apply(fresh()), APPLIED
        for what, curves in (("all metrics", False), ("all metrics and curves", True)):
            layout = Layout.of(correction, curves=curves)
            call = functools.partial(lambda b, m: b.apply(replace(fresh(), layout=m)), backend, layout)
            found[f"{name}, {what}"] = call, APPLIED
    return found


def launches(body: Callable[[], object]) -> int:
    """Kernels of one call."""
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        body()
        torch.cuda.synchronize()
    return len([e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=50)
    repeat = parser.parse_args().repeat
    columns = ("", "microseconds", "times the copy", "kernels", "host microseconds")
    table = Table(*columns, title=torch.cuda.get_device_name())
    for shape, sizes in SHAPES.items():
        copies = {size: microseconds(copying(size * sum(sizes)), repeat)[0] for size in (OUTCOME, APPLIED)}
        for name, (body, size) in bodies(sizes).items():
            taken, queued = microseconds(body, repeat)
            numbers = (f"{taken:.1f}", f"{taken / copies[size]:.2f}", str(launches(body)), f"{queued:.0f}")
            table.add_row(f"{shape}: {name}", *numbers)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
