"""Shows a run's metrics while it runs, and writes them to metrics.jsonl. Each rollout is a line.

`install` makes the processes that log metrics also write them to tracked.jsonl, as JSON lines {"axis",
"time", "metrics"}. Each command that starts or resumes the run first writes a line with the axis `BEGIN`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

from slime_ext.core.metrics import step_file
from slime_ext.core.metrics.step_file import StepFile, append, finite
from slime_ext_cpu.import_hooks import ImportHooks, around
from slime_ext_cpu.stand_ins import HOSTS, hosts

TRACKED, METRICS = "tracked.jsonl", "metrics.jsonl"  # the host's log calls in their order; a line per rollout
ROLLOUT = "rollout"  # identifies a line of metrics.jsonl
BEGIN, TRAIN = "begin", "train/step"  # axes
REWARD, HELDOUT = "rollout/raw_reward", "eval/heldout"
TRAINED = "trained_"  # prefix of metrics that were evaluated with the trainer's unrounded weights
HELDOUT_TRAINED = TRAINED + HELDOUT
PRINTED = {"reward": REWARD, "k3": "train/off_policy/k3_kl", "ess": "train/off_policy/ess_weight"}
LAST_OF_ROLLOUT = "perf/step_time"
POLL_S = 0.5
FILE = "SLIME_EXT_TRACKED"  # the variable that holds the path of tracked.jsonl
MODULES = ("utils.tracking_utils", "utils.logging_utils", "observability.logging_utils")  # by release
BEFORE = -1  # the rollout number of an evaluation before training


@dataclass
class Row:
    """What the host logged about one rollout.

    Attributes:
        metrics: every value of each metric, in the order in which the host logged them.
        time: when the host logged the last value, in seconds since 1970.
        is_written: whether metrics.jsonl has all of them.
    """

    metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    time: float = 0.0
    is_written: bool = False


class Rows:
    """Builds the lines of metrics.jsonl from what the host logged since a command began.

    Args:
        file: metrics.jsonl.
        steps: optimizer steps per rollout.
        began: when the command began, in seconds since 1970.
    """

    def __init__(self, file: StepFile, steps: int, began: float) -> None:
        self.file, self.steps, self.began = file, steps, began
        self.by_rollout: dict[int, Row] = {}

    def take(self, axis: str, when: float, metrics: dict[str, float]) -> int:
        """Adds what the host logged to the row of its rollout, and returns the rollout."""
        rollout = int(metrics.pop(axis, 0)) // (self.steps if axis == TRAIN else 1)
        is_score = HELDOUT in metrics or HELDOUT_TRAINED in metrics
        if is_score and rollout == 0 and REWARD not in self.by_rollout.get(0, Row()).metrics:
            rollout = BEFORE
        row = self.by_rollout.setdefault(rollout, Row())
        row.time = when
        for name, value in metrics.items():
            row.metrics[name].append(value)
        for other, each in self.by_rollout.items():  # rewriting a line cuts off the file from there on
            each.is_written &= other < rollout
        return rollout

    def write(self, before: float = math.inf) -> None:
        """Writes the rows of rollouts below `before` that metrics.jsonl lacks.

        Raises:
            OSError: the file cannot be written. The next call tries again.
        """
        for rollout, row in sorted(self.by_rollout.items()):
            if rollout < before and not row.is_written:
                clock = {"time": row.time, "seconds": round(row.time - self.began, 1)}
                means = {name: fmean(values) for name, values in row.metrics.items()}
                self.file.add({ROLLOUT: rollout}, clock | means)
                row.is_written = True


class Progress:
    """Reads what the host logs, prints it, and writes it to metrics.jsonl.

    First writes the rows that the previous command left unwritten, because it may have been killed.

    Args:
        folder: the run's folder.
        rollouts: number of rollouts at which the run ends.
        steps: optimizer steps per rollout.
        show: prints a line on the screen.

    Raises:
        OSError: a file of the run cannot be written.
    """

    def __init__(self, folder: Path, rollouts: int, steps: int, show: Callable[[str], None]) -> None:
        self.tracked, self.rollouts, self.show = folder / TRACKED, rollouts, show
        file, began = StepFile(folder / METRICS), round(time.time(), 3)
        if (former := _rows_of_last_command(self.tracked, file)) is not None:
            former.write()
        append(self.tracked, {"axis": BEGIN, "time": began, "metrics": {"steps": steps}})
        self.place = self.tracked.stat().st_size
        self.rows = Rows(file, steps, began)
        self.began, self.clock = time.monotonic(), []

    def read(self) -> None:
        """Reads the complete lines that were written since the last call.

        Raises:
            OSError: a file cannot be read or written. The next call continues where this one stopped.
        """
        with self.tracked.open("rb") as file:
            file.seek(self.place)
            for line in file:
                if not line.endswith(b"\n"):  # still being written
                    break
                self.place += len(line)
                if logged := _logged(line):
                    self._take(*logged)

    def _take(self, axis: str, when: float, metrics: dict[str, float]) -> None:
        rollout = self.rows.take(axis, when, metrics)
        for name, weights in ((HELDOUT, ""), (HELDOUT_TRAINED, " with the trainer's weights")):
            if name in metrics:
                self._print(f"held-out reward {metrics[name]:.3f}{weights}")
        if LAST_OF_ROLLOUT in metrics:
            self._show(rollout, self.rows.by_rollout[rollout].metrics)
        if axis == TRAIN:
            self.rows.write(before=rollout)

    def _show(self, rollout: int, metrics: dict[str, list[float]]) -> None:
        self.clock.append(time.monotonic())
        numbers = [f"{name} {fmean(metrics[key]):.3g}" for name, key in PRINTED.items() if key in metrics]
        spent = self.clock[-1] - (self.clock[-2] if len(self.clock) > 1 else self.began)
        each = (self.clock[-1] - self.clock[0]) / (len(self.clock) - 1) if len(self.clock) > 1 else spent
        left = each * (self.rollouts - 1 - rollout)
        counted = f"rollout {rollout + 1}/{self.rollouts}"
        self._print("  ".join([counted, *numbers, f"{spent:.0f} s", f"{left:.0f} s left"]))

    def _print(self, line: str) -> None:
        try:
            self.show(line)
        except OSError:  # nothing reads the pipe, or the disk is full: the run continues without a screen
            self.show = lambda line: None

    def finish(self) -> None:
        """Writes the remaining rows.

        Raises:
            OSError: a file of the run cannot be written.
        """
        self.read()
        self.rows.write()


def _rows_of_last_command(tracked: Path, file: StepFile) -> Rows | None:
    """Returns the rows of the previous command. None if there was none or its release wrote no `BEGIN`."""
    rows = None
    if tracked.exists():
        with tracked.open("rb") as lines:
            for axis, when, metrics in filter(None, map(_logged, lines)):
                if axis == BEGIN:
                    rows = Rows(file, int(metrics["steps"]), when)
                elif rows is not None:
                    rows.take(axis, when, metrics)
    return rows


def _logged(line: bytes) -> tuple[str, float, dict[str, float]] | None:
    """Reads axis, time and metrics of a line of tracked.jsonl. None if a full disk cut the line off."""
    try:
        logged = json.loads(line)
        known = {name: math.nan if value is None else value for name, value in logged["metrics"].items()}
        return logged["axis"], logged["time"], known
    except (ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def following(progress: Progress) -> Iterator[None]:
    """Follows the run in a thread until the block ends."""
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(POLL_S):
            with contextlib.suppress(OSError):  # the disk is full: `finish` reports it if it still is then
                progress.read()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        progress.finish()


def read(folder: Path) -> list[dict[str, float | None]]:
    """Returns the rows of metrics.jsonl in their order. None marks a number that was not finite."""
    file = folder / METRICS
    return list(step_file.rows(file, ROLLOUT)) if file.exists() else []


def install() -> None:
    """Adds the logging to the import hooks that the stand-ins installed in this process."""
    hooks = next(finder for finder in sys.meta_path if isinstance(finder, ImportHooks))
    for host in HOSTS:
        for module in MODULES:
            hooks.add("after", f"{host}.{module}", _also_write)


def _also_write(module: ModuleType) -> None:
    if not hasattr(module, "log"):  # in this release another module has it
        return

    @around(module, "log")
    def logged(log: Any, args: Any, metrics: dict[str, Any], step_key: str) -> None:
        numbers = _numbers(metrics)
        if hosts.is_unrounded():  # `hosts.score` evaluates twice, and the host gives both the same names
            numbers = {name if name == step_key else TRAINED + name: n for name, n in numbers.items()}
        else:
            log(args, metrics, step_key)
        line = {"axis": step_key, "time": round(time.time(), 3), "metrics": finite(numbers)}
        append(Path(os.environ[FILE]), line)


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Returns the host's metrics that are numbers or tensors with one element."""
    numbers = {}
    for name, value in metrics.items():
        with contextlib.suppress(TypeError, ValueError):
            numbers[name] = float(value)
    return numbers
