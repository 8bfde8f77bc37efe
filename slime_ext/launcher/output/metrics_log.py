"""metrics.jsonl and TensorBoard events: one JSON object per optimizer step, rollout or evaluation."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from slime_ext.errors import DataError

FILE = "metrics.jsonl"
Kind = Literal["step", "rollout", "eval"]


class MetricsLog:
    """Appends to <run_path>/metrics.jsonl and TensorBoard; a resumed run first loses what it will redo.

    Every line has kind, rollout_id, step (optimizer steps done) and time (seconds since 1970), then the
    metrics. A number that is not finite is written as null: the file is strict JSON.
    """

    def __init__(
        self, run_path: str | Path, tensorboard_dir: str | None = None, resume_rollout: int | None = None
    ):
        """Opens the files. `resume_rollout` is the first rollout to come; lines from it on are cut.

        Without it a file that is there is cut to nothing.
        """
        self.path = Path(run_path) / FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in _rows(self.path) if row["rollout_id"] < (resume_rollout or 0)]
        self._kept = {(row["kind"], row["step"]) for row in kept}
        temporary = self.path.with_suffix(".tmp")  # a kill in between leaves the first
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        temporary.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        self._events = None
        if tensorboard_dir is not None:
            from torch.utils.tensorboard import SummaryWriter

            purged = 1 + max(row["step"] for row in kept) if kept else None
            self._events = SummaryWriter(tensorboard_dir, purge_step=purged)

    def log(self, kind: Kind, values: Mapping[str, Any], *, rollout_id: int, step: int) -> None:
        """Writes one line; values are numbers, 0-d tensors or None."""
        row = {"kind": kind, "rollout_id": rollout_id, "step": step, "time": round(time.time(), 3)}
        row |= {name: _number(name, value) for name, value in values.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        for name in values if self._events else ():
            if row[name] is not None:
                self._events.add_scalar(name, row[name], step)

    def has(self, kind: Kind, step: int) -> bool:
        """Whether the file, as it was found, had such a line after this many optimizer steps."""
        return (kind, step) in self._kept

    def close(self) -> None:
        self._file.close()
        if self._events:
            self._events.close()


def read_metrics(run_path: str | Path) -> list[dict[str, Any]]:
    """The lines of a run, given its directory or the file itself.

    A last line that a killed run left unfinished is left out.

    Raises:
        DataError: no such file, another line that is no JSON object.
    """
    path = Path(run_path)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"{run_path}: expected a run's directory with {FILE}, got none")
    return list(_rows(path))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        row = None
        with contextlib.suppress(ValueError):
            row = json.loads(line)
        if isinstance(row, dict):
            yield row
        elif number < len(lines):
            raise DataError(f"{path}:{number}: expected a JSON object, got {line[:40]!r}")


def _number(name: str, value: Any) -> float | int | None:
    if value is None or isinstance(value, int):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"metric {name}: expected a number, got {value!r}") from error
    return number if math.isfinite(number) else None
