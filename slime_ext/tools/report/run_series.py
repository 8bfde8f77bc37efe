"""The metrics of a run over its optimizer steps, read from what slime or miles leaves.

Read below the run's folder: TensorBoard events, off_policy.jsonl, and, where neither holds the reward or how
far the log-probs differ, rollout and train dumps.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_ext.errors import ConfigError, DataError

if TYPE_CHECKING:  # it imports torch
    from slime_ext.tools.analysis.records import DumpedRollout

EVENTS, STEPS = "events.out.tfevents*", "off_policy.jsonl"
REWARD, K3 = "rollout/raw_reward", "train/off_policy/k3_kl"
DIFFERENCE = "train/train_rollout_logprob_abs_diff"  # slime's own
QUANTILES = ("ratio_p01", "ratio_p50", "ratio_p99")
Series = dict[str, dict[float, float]]  # name, as in the host's log: optimizer step: value


def run_folders(folder: Path) -> list[Path]:
    """The folders of single runs below one: itself, or several where folders side by side hold a run each.

    Raises:
        DataError: no such folder.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: expected the folder of a run, got none")
    kind = EVENTS if _any(folder, EVENTS) else STEPS
    inner = folder
    while not any(inner.glob(kind)):
        holding = [path for path in sorted(inner.iterdir()) if path.is_dir() and _any(path, kind)]
        if len(holding) != 1:
            return [run for path in holding for run in run_folders(path)] or [folder]
        inner = holding[0]
    return [folder]


def _any(folder: Path, pattern: str) -> bool:
    return any(folder.rglob(pattern))


def read_run(folder: Path) -> Series:
    """Every metric that the run left.

    Raises:
        DataError: nothing of a run is in the folder.
        ConfigError: TensorBoard events, but no package that reads them.
    """
    found = _finite(read_events(folder))
    rows = list(_rows(folder))
    steps, factor = _steps_per_rollout(found, rows)
    series = {name: _scaled(name, values, factor) for name, values in found.items()}
    for row in rows:
        step = row["rollout_id"] * steps + row.get("step_id", 0)
        for name, value in row.items():
            if name.startswith("off_policy/") and value is not None and f"train/{name}" not in found:
                series.setdefault(f"train/{name}", {})[step] = value
    if REWARD not in series or not {K3, DIFFERENCE} & series.keys():
        series = _of_dumps(folder, steps) | series
    if not series:
        raise DataError(
            f"{folder}: expected TensorBoard events, off_policy.jsonl or dumps of a run, got none: log with "
            "--use-tensorboard, or give the folder of --save or --dump-details"
        )
    return series


def _finite(series: Series) -> Series:
    kept = {
        name: {step: value for step, value in values.items() if math.isfinite(value)}
        for name, values in series.items()
    }
    return {name: values for name, values in kept.items() if values}


def read_events(folder: Path) -> Series:
    """The scalars of the TensorBoard events below a folder.

    Raises:
        ConfigError: there are some, but no package that reads them.
    """
    paths = sorted({path.parent for path in folder.rglob(EVENTS)})
    if not paths:
        return {}
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise ConfigError(
            f"{paths[0]}: expected the package tensorboard, which reads it, got none: pip install tensorboard"
        ) from error
    out: Series = {}
    for path in paths:
        events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        for name in events.Tags()["scalars"]:
            out.setdefault(name, {}).update({e.step: e.value for e in events.Scalars(name)})
    return out


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of off_policy.jsonl; one that a killed run left unfinished is left out."""
    for path in sorted(folder.rglob(STEPS)):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("rollout_id"), int):
                    yield row


def _steps_per_rollout(found: Series, rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Optimizer steps of a rollout, and optimizer steps of one step on the axis of ``rollout/``: slime counts
    rollouts there, unless --wandb-always-use-train-step has it count optimizer steps."""
    steps = 1 + max((row.get("step_id", 0) for row in rows), default=0)
    train, rollout = _last(found, "train/"), _last(found, "rollout/")
    if train is None or rollout is None:
        return steps, steps
    ratio = (train + 1) / (rollout + 1)
    steps = steps if rows else max(round(ratio), 1)
    return steps, steps if ratio > math.sqrt(steps) else 1


def _last(found: Series, part: str) -> float | None:
    return max((max(values) for name, values in found.items() if name.startswith(part)), default=None)


def _scaled(name: str, values: Mapping[float, float], factor: int) -> dict[float, float]:
    return dict(values) if name.startswith("train/") else {s * factor: v for s, v in values.items()}


def _of_dumps(folder: Path, factor: int) -> Series:
    from slime_ext.tools.analysis.document import Skipped
    from slime_ext.tools.analysis.pipeline import load
    from slime_ext.tools.analysis.readers.find import find

    parents = {path.parent for kind in ("rollout_data", "train_data") for path in folder.rglob(kind)}
    out: Series = defaultdict(dict)
    jobs = ()
    with contextlib.suppress(DataError):  # folders without a dump of training
        jobs = find(sorted(parents)).jobs
    for job in jobs:
        for rollout in load(job):
            if not isinstance(rollout, Skipped):
                for name, value in _of_rollout(rollout).items():
                    out[name][rollout.rollout_id * factor] = value
    return dict(out)


def _of_rollout(rollout: DumpedRollout) -> dict[str, float]:
    from slime_ext.tools.analysis.measures.sums import Sums

    sums = Sums()
    for part in rollout.parts():
        sums.add(part)
    numbers = sums.numbers()
    found = {REWARD: numbers.reward, K3: numbers.k3}
    found |= {f"train/off_policy/{name}": getattr(numbers, name) for name in QUANTILES}
    return {name: value for name, value in found.items() if value is not None}
