"""Reads the metrics of a run over its optimizer steps.

They are in the TensorBoard events and the off_policy.jsonl that slime or miles write below the run's folder.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from slime_ext.core.metrics.step_file import rows
from slime_ext.errors import ConfigError, DataError

EVENTS, STEPS = "events.out.tfevents*", "off_policy.jsonl"
REWARD, K3 = "rollout/raw_reward", "train/off_policy/k3_kl"
DIFFERENCE = "train/train_rollout_logprob_abs_diff"  # a metric of slime
Series = dict[str, dict[float, float]]  # {name in the host's log: {optimizer step: value}}


def run_folders(folder: Path) -> list[Path]:
    """Returns the folders of single runs: the folder itself, or several subfolders with runs.

    A run's events and lines can be in two places: in the folder and a subfolder, or in two subfolders. A
    subfolder and a link to it count as one.

    Raises:
        DataError: the folder does not exist.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: expected the folder of a run, got none: check the path")
    kinds = (EVENTS, STEPS)
    here = [kind for kind in kinds if any(folder.glob(kind))]
    subfolders = {path.resolve(): path for path in sorted(folder.iterdir()) if path.is_dir()}.values()
    below = {path: [kind for kind in kinds if any(path.rglob(kind))] for path in subfolders}
    below = {path: logs for path, logs in below.items() if logs}
    with_events = [path for path in below if EVENTS in below[path]]
    if EVENTS in here or not below or (here and not with_events):
        return [folder]
    has_one_log = len(with_events) == 1 and (here or below[with_events[0]] == [EVENTS])
    parts = with_events if has_one_log else list(below)
    runs = [run for path in parts for run in run_folders(path)]
    return [folder] if len(runs) == 1 else runs


def read_run(folder: Path) -> Series:
    """Reads every metric that a run logged, and skips values that are not finite.

    Raises:
        DataError: the folder contains no metrics, or lines of two runs.
        ConfigError: there are TensorBoard events, but the package that reads them is not installed.
    """
    events = read_events(folder)
    paths = sorted(folder.rglob(STEPS))
    if len(paths) > 1:
        raise DataError(
            f"{paths[0]} and {paths[1]}: expected one {STEPS} of a run, got {len(paths)}: give the folder of "
            "one run, or move the other file away"
        )
    lines = [row for path in paths for row in rows(path, "rollout_id")]
    steps, factor = _steps_per_rollout(events, lines)
    series: Series = {}
    for row in lines:
        step = row["rollout_id"] * steps + row.get("step_id", 0)
        for name, value in row.items():
            if name.startswith("off_policy/") and value is not None:
                series.setdefault(f"train/{name}", {})[step] = value
    for name, values in events.items():
        scale = 1 if name.startswith("train/") else factor
        known = {step * scale: value for step, value in values.items() if math.isfinite(value)}
        series |= {name: known} if known else {}
    if not series:
        raise DataError(
            f"{folder}: expected TensorBoard events or off_policy.jsonl, got none: train with "
            "--use-tensorboard, or give the folder of --save; `slime-ext analyze` draws dumps"
        )
    return series


def read_events(folder: Path) -> Series:
    """Reads the scalars of the TensorBoard events below a folder.

    Raises:
        ConfigError: there are events, but the package that reads them is not installed.
    """
    paths = sorted({path.parent for path in folder.rglob(EVENTS)})
    if not paths:
        return {}
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise ConfigError(
            f"{paths[0]}: expected the package tensorboard to read it, got none: pip install tensorboard"
        ) from error
    out: Series = {}
    for path in paths:
        events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        for name in events.Tags()["scalars"]:
            out.setdefault(name, {}).update({e.step: e.value for e in events.Scalars(name)})
    return out


def _steps_per_rollout(events: Series, lines: list[dict[str, Any]]) -> tuple[int, int]:
    """Counts optimizer steps: per rollout, and per step on the axis of ``rollout/``.

    On that axis slime counts rollouts, or optimizer steps under --wandb-always-use-train-step.
    """
    steps = 1 + max((row.get("step_id", 0) for row in lines), default=0)
    train, rollout = _last(events, "train/"), _last(events, "rollout/")
    if train is None or rollout is None:
        return steps, steps
    ratio = (train + 1) / (rollout + 1)
    steps = steps if lines else max(round(ratio), 1)
    return steps, steps if ratio > math.sqrt(steps) else 1


def _last(events: Series, part: str) -> float | None:
    return max((max(values) for name, values in events.items() if name.startswith(part)), default=None)
