"""Measures time, launches, waits and memory of calls on a device. Contenders take turns."""

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
    """The measurements of one contender on one batch.

    Attributes:
        milliseconds: median time of a call, until the device has done its work; None if it was left out.
        launches: kernels and copies that a call queues; None on a CPU, which queues none.
        waits: how often a call waits for the device; None on a CPU, or if it was not counted.
        peak_mb: device memory that a call adds at its peak; None on a CPU.
        times_copy: its time / the time of a copy of what it reads.
        times_mis: the time of slime's mis.py / its time.
        share: fraction of a training step that the hook's calls take.
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
    share: float | None = None
    why: str = ""


def measure(
    row: Row, bodies: Mapping[str, Body], device: str, repeat: int, until: float, with_waits: bool = True
) -> list[Row]:
    """Returns a row for each body, with the other fields of `row`.

    A body is left out if it raises, or if `until` (time.monotonic) passes before its warm-up. `why` says so.
    """
    rows = {name: replace(row, contender=name) for name in bodies}
    for name, body in bodies.items():
        rows[name] = replace(rows[name], why=_warm_up(body, device, until))
    taken: dict[str, list[float]] = {name: [] for name in bodies if not rows[name].why}
    for _ in range(repeat):
        for name, times in taken.items():
            _once(bodies[name], device)  # not timed: a hook reads its flags again if they are new
            times.append(_once(bodies[name], device))
    counted = {"launches": launches, "peak_mb": peak_mb} | ({"waits": waits} if with_waits else {})
    for name, times in taken.items():
        rows[name] = _counted(
            replace(rows[name], milliseconds=statistics.median(times)), bodies, device, counted
        )
    return list(rows.values())


def _counted(row: Row, bodies: Mapping[str, Body], device: str, counted: Mapping[str, Callable]) -> Row:
    """Returns the row with the counts of one call. If a count fails, the time stays and the row says why."""
    for name, count in counted.items():
        try:
            row = replace(row, **{name: count(bodies[row.contender], device)})
        except Exception as error:
            row = replace(row, why=f"{name}: {said(error)}")
    return row


def _warm_up(body: Body, device: str, until: float) -> str:
    """Warms a body up. Returns why it cannot be measured; "" if it can."""
    for _ in range(WARM_UP):
        if time.monotonic() > until:
            return "no time left"
        try:
            _once(body, device)
        except Exception as error:  # a contender's failure is a line, and the others still run
            return said(error)
    return ""


def said(error: Exception) -> str:
    """Returns an error in one line, and prints its traceback to the step's log."""
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
    """Counts the kernels and copies that one call queues, with PyTorch's profiler."""
    if device != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        body()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def waits(body: Body, device: str) -> int | None:
    """Counts how often one call waits for the device.

    If a call in PyTorch's error mode passes, it never waits. Otherwise we count PyTorch's warnings."""
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
    """Returns the MB of device memory that one call adds at its peak."""
    if device != "cuda":
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    body()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def parser(document: str) -> argparse.ArgumentParser:
    """Returns the flags of every timed step: file for its lines, time limit, and device."""
    made = argparse.ArgumentParser(description=document.splitlines()[0])
    made.add_argument("--lines", type=Path, required=True)
    made.add_argument("--seconds", type=float, required=True)
    made.add_argument("--device", default="cuda")
    return made


def append(rows: list[Row], lines: Path) -> None:
    """Appends a line of JSON for each row, so that the rows stay if a later step is cut off."""
    with lines.open("a") as file:
        file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)


def read(lines: Path) -> list[Row]:
    """Returns the rows of a file; an empty list if it does not exist."""
    return [Row(**json.loads(line)) for line in lines.read_text().splitlines()] if lines.exists() else []
