"""A run's metrics while it runs: one line on the screen and one of metrics.jsonl per rollout.

`install` writes down what the host logs, in the processes that log it: a line of JSON, {"axis", "time",
"metrics"}. Each command that starts or resumes the run puts a line of the axis `BEGIN` before them.
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

from slime_ext.host import step_file
from slime_ext.host.step_file import StepFile, append, finite
from slime_ext_cpu.import_hooks import ImportHooks, around
from slime_ext_cpu.stand_ins import HOSTS, hosts

TRACKED, METRICS = "tracked.jsonl", "metrics.jsonl"  # what the host logged as it came; a line per rollout
ROLLOUT = "rollout"  # identifies a line of metrics.jsonl
BEGIN, TRAIN = "begin", "train/step"  # axes
REWARD, HELDOUT = "rollout/raw_reward", "eval/heldout"
TRAINED = "trained_"  # before the name of what was evaluated with the trainer's own, unrounded weights
HELDOUT_TRAINED = TRAINED + HELDOUT
SHOWN = {"reward": REWARD, "k3": "train/off_policy/k3_kl", "ess": "train/off_policy/ess_weight"}
LAST_OF_ROLLOUT = "perf/step_time"
POLL_S = 0.5
FILE = "SLIME_EXT_TRACKED"  # the variable that names the file of what the host logged
MODULES = ("utils.tracking_utils", "utils.logging_utils", "observability.logging_utils")  # by release
BEFORE = -1  # the rollout of an evaluation before the first


@dataclass
class Row:
    """What the host logged of one rollout.

    Attributes:
        metrics: every value of each metric, in the order in which they came.
        time: of the last of them, in seconds since 1970.
        is_written: whether metrics.jsonl has it all.
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
        for other, each in self.by_rollout.items():  # to write a line again, the file is cut there
            each.is_written &= other < rollout
        return rollout

    def write(self, before: float = math.inf) -> None:
        """Writes the rows of rollouts below `before` that metrics.jsonl lacks.

        Raises:
            OSError: the file cannot be written; the next call tries again.
        """
        for rollout, row in sorted(self.by_rollout.items()):
            if rollout < before and not row.is_written:
                clock = {"time": row.time, "seconds": round(row.time - self.began, 1)}
                means = {name: fmean(values) for name, values in row.metrics.items()}
                self.file.add({ROLLOUT: rollout}, clock | means)
                row.is_written = True


class Progress:
    """Follows what the host logs, for the screen and for metrics.jsonl.

    First writes the rows of the command before, because a killed command leaves some unwritten.

    Args:
        folder: of the run.
        rollouts: number at which it ends.
        steps: optimizer steps per rollout.
        show: prints a line on the screen.

    Raises:
        OSError: a file of the run cannot be written.
    """

    def __init__(self, folder: Path, rollouts: int, steps: int, show: Callable[[str], None]) -> None:
        self.tracked, self.rollouts, self.show = folder / TRACKED, rollouts, show
        file, now = StepFile(folder / METRICS), round(time.time(), 3)
        if (former := _rows_of_last_command(self.tracked, file)) is not None:
            former.write()
        append(self.tracked, {"axis": BEGIN, "time": now, "metrics": {"steps": steps}})
        self.place = self.tracked.stat().st_size
        self.rows = Rows(file, steps, now)
        self.began, self.clock = time.monotonic(), []

    def read(self) -> None:
        """Takes the complete lines written since the last call.

        Raises:
            OSError: a file cannot be read or written; the next call goes on where this one stopped.
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
        numbers = [f"{name} {fmean(metrics[key]):.3g}" for name, key in SHOWN.items() if key in metrics]
        spent = self.clock[-1] - (self.clock[-2] if len(self.clock) > 1 else self.began)
        each = (self.clock[-1] - self.clock[0]) / (len(self.clock) - 1) if len(self.clock) > 1 else spent
        left = each * (self.rollouts - 1 - rollout)
        counted = f"rollout {rollout + 1}/{self.rollouts}"
        self._print("  ".join([counted, *numbers, f"{spent:.0f} s", f"{left:.0f} s left"]))

    def _print(self, line: str) -> None:
        try:
            self.show(line)
        except OSError:  # nobody reads the screen, or it has no room: the run and its rows go on
            self.show = lambda line: None

    def finish(self) -> None:
        """Writes what is left.

        Raises:
            OSError: a file of the run cannot be written.
        """
        self.read()
        self.rows.write()


def _rows_of_last_command(tracked: Path, file: StepFile) -> Rows | None:
    """The rows of the command before this one; None for a new run, or one of a release without `BEGIN`."""
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
    """Axis, time and metrics of a line of tracked.jsonl; None for one that a full disk cut."""
    try:
        said = json.loads(line)
        known = {name: math.nan if value is None else value for name, value in said["metrics"].items()}
        return said["axis"], said["time"], known
    except (ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def shown(progress: Progress) -> Iterator[None]:
    """Follows the run in a thread until the block ends."""
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(POLL_S):
            with contextlib.suppress(OSError):  # no room: `finish` says so if it stays
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
    """The rows of metrics.jsonl, in their order; None is a number that was not finite."""
    file = folder / METRICS
    return list(step_file.rows(file, ROLLOUT)) if file.exists() else []


def install() -> None:
    """Registers with the hooks that the stand-ins have installed in this process."""
    hooks = next(finder for finder in sys.meta_path if isinstance(finder, ImportHooks))
    for host in HOSTS:
        for module in MODULES:
            hooks.add("after", f"{host}.{module}", _also_write)


def _also_write(module: ModuleType) -> None:
    if not hasattr(module, "log"):  # of releases in which another module has it
        return

    @around(module, "log")
    def logged(log: Any, args: Any, metrics: dict[str, Any], step_key: str) -> None:
        numbers = _numbers(metrics)
        if hosts.is_unrounded():  # of `hosts.score`: its evaluation has the names of the one before it
            numbers = {name if name == step_key else TRAINED + name: n for name, n in numbers.items()}
        else:
            log(args, metrics, step_key)
        line = {"axis": step_key, "time": round(time.time(), 3), "metrics": finite(numbers)}
        append(Path(os.environ[FILE]), line)


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Those of the host's metrics that are numbers, tensors of one element among them."""
    found = {}
    for name, value in metrics.items():
        with contextlib.suppress(TypeError, ValueError):
            found[name] = float(value)
    return found
