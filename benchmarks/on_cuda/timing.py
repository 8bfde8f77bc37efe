"""Time, launches, waits and memory of calls on a device; contenders take turns."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

WARM_UP = 3
Body = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One contender on one batch.

    Attributes:
        milliseconds: median of a call until the device has done its work; None where it was left out.
        launches: kernels and copies that a call queues; None on a CPU, which queues none.
        waits: how often a call waits for the device; None on a CPU, and where nobody counted.
        peak_mb: memory of the device that a call takes at once, beyond what was there; None on a CPU.
        times_copy: by how much it is slower than a copy of what it reads.
        times_mis: by how much it is faster than slime's mis.py.
        why: why it was left out, or what could not be counted.
    """

    what: str
    tokens: int
    contender: str
    milliseconds: float | None = None
    launches: int | None = None
    waits: int | None = None
    peak_mb: float | None = None
    times_copy: float | None = None
    times_mis: float | None = None
    why: str = ""


def measure(
    row: Row, bodies: Mapping[str, Body], device: str, repeat: int, until: float, with_waits: bool = True
) -> list[Row]:
    """A row for each body, on the pattern of `row`. One that raises, or whose turn comes after `until`
    (time.monotonic) without having been warmed up, is left out and says so.
    """
    rows = {name: replace(row, contender=name) for name in bodies}
    for name, body in bodies.items():
        rows[name] = replace(rows[name], why=_warm_up(body, device, until))
    taken: dict[str, list[float]] = {name: [] for name in bodies if not rows[name].why}
    for _ in range(repeat):
        for name, times in taken.items():
            _once(bodies[name], device)  # not timed: after a call with other flags a hook reads its own again
            times.append(_once(bodies[name], device))
    counted = {"launches": launches, "peak_mb": peak_mb} | ({"waits": waits} if with_waits else {})
    for name, times in taken.items():
        rows[name] = _counted(
            replace(rows[name], milliseconds=statistics.median(times)), bodies, device, counted
        )
    return list(rows.values())


def _counted(row: Row, bodies: Mapping[str, Body], device: str, counted: Mapping[str, Callable]) -> Row:
    """The row with what is counted of one call; a count that fails leaves the time as it is and says so."""
    for name, count in counted.items():
        try:
            row = replace(row, **{name: count(bodies[row.contender], device)})
        except Exception as error:
            row = replace(row, why=f"{name}: {said(error)}")
    return row


def _warm_up(body: Body, device: str, until: float) -> str:
    """Why a body cannot be measured; empty where it can."""
    for _ in range(WARM_UP):
        if time.monotonic() > until:
            return "no time left"
        try:
            _once(body, device)
        except Exception as error:  # one contender's failure is a line, the others still run
            return said(error)
    return ""


def said(error: Exception) -> str:
    """An error in one line; its traceback goes to the step's log."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _once(body: Body, device: str) -> float:
    _settle(device)
    begin = time.perf_counter()
    body()
    _settle(device)
    return (time.perf_counter() - begin) * 1e3


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def launches(body: Body, device: str) -> int | None:
    """Kernels and copies that one call queues, from PyTorch's profiler."""
    if device != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        body()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def waits(body: Body, device: str) -> int | None:
    """How often the host waits for the device in one call: where an error does not stop it never, else as
    often as PyTorch warns of it."""
    if device != "cuda":
        body()
        return None
    try:
        with _debugging("error"):
            body()
        return 0
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
    with _debugging("warn"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        body()
    return max(1, sum("called a synchronizing" in str(warning.message) for warning in said))


@contextlib.contextmanager
def _debugging(mode: str) -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def peak_mb(body: Body, device: str) -> float | None:
    """MB of the device that one call takes at once."""
    if device != "cuda":
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    body()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def parser(document: str) -> argparse.ArgumentParser:
    """What every timed step is told: where its lines go, how long it may take, and the device."""
    made = argparse.ArgumentParser(description=document.splitlines()[0])
    made.add_argument("--lines", type=Path, required=True)
    made.add_argument("--seconds", type=float, required=True)
    made.add_argument("--device", default="cuda")
    return made


def append(rows: list[Row], lines: Path) -> None:
    """Adds a line of JSON for each row: what a step has shown stays, should the next be cut off."""
    with lines.open("a") as file:
        file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)


def read(lines: Path) -> list[Row]:
    """The rows of a file; none where there is no file."""
    return [Row(**json.loads(line)) for line in lines.read_text().splitlines()] if lines.exists() else []
