"""A run's metrics while it runs: one line on the screen and one of metrics.jsonl per rollout.

`install` writes down what the host logs, in the processes that log it: a line of JSON, {"axis", "metrics"}.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

from slime_ext.tools.without_cuda.import_hooks import ImportHooks, around
from slime_ext.tools.without_cuda.stand_ins import HOSTS

TRACKED, METRICS = "tracked.jsonl", "metrics.jsonl"  # what the host logged as it came; a line per rollout
REWARD, HELDOUT = "rollout/raw_reward", "eval/heldout"
SHOWN = {"reward": REWARD, "k3": "train/off_policy/k3_kl", "ess": "train/off_policy/ess_weight"}
LAST_OF_ROLLOUT = "perf/step_time"
POLL_S = 0.5
FILE = "SLIME_EXT_TRACKED"  # the variable that names the file of what the host logged
MODULES = ("utils.tracking_utils", "utils.logging_utils", "observability.logging_utils")  # by release
BEFORE = -1  # the rollout of an evaluation before the first


class Progress:
    """Builds the rows of a run from what the host logged.

    Args:
        folder: of the run.
        rollouts: number at which it ends.
        steps: optimizer steps per rollout.
        show: prints a line on the screen.
    """

    def __init__(self, folder: Path, rollouts: int, steps: int, show: Callable[[str], None]) -> None:
        self.folder, self.rollouts, self.steps, self.show = folder, rollouts, steps, show
        self.tracked = folder / TRACKED
        self.place = self.tracked.stat().st_size if self.tracked.exists() else 0
        self.rows: dict[int, dict[str, list[float]]] = {}
        self.began, self.clock = time.monotonic(), []

    def read(self) -> None:
        """Reads the complete lines written since the last call."""
        if not self.tracked.exists():
            return
        with self.tracked.open("rb") as file:
            file.seek(self.place)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.place += len(whole)
        for line in whole.splitlines():
            said = json.loads(line)
            self._take(said["axis"], said["metrics"])

    def _take(self, axis: str, metrics: dict[str, float]) -> None:
        rollout = int(metrics.pop(axis, 0)) // (self.steps if axis == "train/step" else 1)
        if HELDOUT in metrics and REWARD not in self.rows.get(rollout, {}):
            rollout = BEFORE
        for done in [row for row in self.rows if row < rollout and axis == "train/step"]:
            self._write(done)
        row = self.rows.setdefault(rollout, defaultdict(list))
        for name, value in metrics.items():
            row[name].append(value)
        if HELDOUT in metrics:
            self.show(f"held-out reward {metrics[HELDOUT]:.3f}")
        if LAST_OF_ROLLOUT in metrics:
            self._show(rollout, row)

    def _show(self, rollout: int, row: dict[str, list[float]]) -> None:
        self.clock.append(time.monotonic())
        numbers = [f"{name} {fmean(row[key]):.3g}" for name, key in SHOWN.items() if key in row]
        spent = self.clock[-1] - (self.clock[-2] if len(self.clock) > 1 else self.began)
        each = (self.clock[-1] - self.clock[0]) / (len(self.clock) - 1) if len(self.clock) > 1 else spent
        left = each * (self.rollouts - 1 - rollout)
        counted = f"rollout {rollout + 1}/{self.rollouts}"
        self.show("  ".join([counted, *numbers, f"{spent:.0f} s", f"{left:.0f} s left"]))

    def _write(self, rollout: int) -> None:
        row = self.rows.pop(rollout)
        line = {"rollout": rollout, "seconds": round(time.monotonic() - self.began, 1)}
        line |= {name: fmean(values) for name, values in row.items()}
        with (self.folder / METRICS).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def finish(self) -> None:
        """Writes what is left."""
        self.read()
        for rollout in sorted(self.rows):
            self._write(rollout)


@contextlib.contextmanager
def shown(progress: Progress) -> Iterator[None]:
    """Follows the run in a thread until the block ends."""
    ended = threading.Event()

    def follow() -> None:
        with contextlib.suppress(OSError):  # nobody reads the screen, or no room: `finish` says so
            while not ended.wait(POLL_S):
                progress.read()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        progress.finish()


def read(folder: Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl, in their order."""
    file = folder / METRICS
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


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
        log(args, metrics, step_key)
        line = json.dumps({"axis": step_key, "metrics": _numbers(metrics)}) + "\n"
        with Path(os.environ[FILE]).open("a") as file:
            file.write(line)


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Those of the host's metrics that are numbers, tensors of one element among them."""
    found = {}
    for name, value in metrics.items():
        with contextlib.suppress(TypeError, ValueError):
            found[name] = float(value)
    return found
