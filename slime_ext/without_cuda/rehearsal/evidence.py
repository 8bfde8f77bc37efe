"""What a rehearsal left behind: recorded calls, dumps, TensorBoard, checkpoint, log."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_ext.analysis.run_series import Series, read_events
from slime_ext.errors import DataError
from slime_ext.without_cuda.rehearsal import observe

if TYPE_CHECKING:
    from slime_ext.analysis.document import Document

# Of a line of a log: what Ray puts before it, and an exception.
PREFIX = re.compile(r"^\((?:\w+ )?pid=\d+[^)]*\)\s?")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
RAISED = re.compile(r"^(?:[a-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Exit|Interrupt))(?::\s*(.*))?$")
OF_RAY = ("RayTaskError", "ActorDiedError", "ActorUnavailableError", "RayActorError", "WorkerCrashedError")
REFUSED = re.compile(r"^\S+\.py: error: (.*)$")  # argparse
FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)')
LONGEST = 300  # characters of a message


@dataclass(frozen=True)
class Evidence:
    """All that the page is made from.

    Args:
        status: exit status of the run.
        seconds: how long it took.
        log: path.
        cause: the last exception in the log, where the status is not 0.
        events: recorded calls.
        rollouts: samples by rollout, as the host dumped them.
        analysis: of the dumps, None where there were none.
        scalars: by name, what TensorBoard holds.
        checkpoint: files and their bytes.
    """

    status: int
    seconds: float
    log: Path
    cause: str = ""
    events: Sequence[Mapping[str, Any]] = ()
    rollouts: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    analysis: Document | None = None
    scalars: Series = field(default_factory=dict)
    checkpoint: Mapping[str, int] = field(default_factory=dict)

    def calls(self, event: str) -> list[Mapping[str, Any]]:
        """Calls of one kind that returned."""
        return [e for e in self.events if e["event"] == event and "error" not in e]

    @property
    def parsed(self) -> Mapping[str, Any]:
        """The host's arguments, with the keys of --custom-config-path; {} where it did not get so far."""
        return (self.calls("parsed") or [{}])[-1]

    @property
    def asks_for_log_probs(self) -> bool:
        """Whether they ask for the hook, which needs the sampler's log-probs."""
        return bool(self.parsed.get("use_tis") or self.parsed.get("get_mismatch_metrics"))

    def errors(self) -> list[Mapping[str, Any]]:
        """Calls that raised, the innermost first."""
        return [e for e in self.events if "error" in e]


def gather(out: Path, status: int, seconds: float) -> Evidence:
    """Reads a rehearsal's folder."""
    log = out / "log"
    text = log.read_text(errors="replace") if log.exists() else ""
    files = {
        str(f.relative_to(out)): f.stat().st_size for f in (out / "checkpoint").rglob("*") if f.is_file()
    }
    return Evidence(
        status, seconds, log, cause_of(text) if status else "", tuple(observe.read(out / "events")),
        _rollouts(out / "dumps/rollout_data"), _analysis(out / "dumps"),
        read_events(out / "tensorboard"), files,
    )  # fmt: skip


def _rollouts(folder: Path) -> dict[int, list[dict[str, Any]]]:
    import torch

    files = [file for file in folder.glob("*.pt") if file.stem.isdigit()]
    return {int(file.stem): torch.load(file, weights_only=False)["samples"] for file in sorted(files)}


def _analysis(folder: Path) -> Document | None:
    """The analysis of ``slime-ext analyze`` over the dumps."""
    from slime_ext.analysis.request import Request
    from slime_ext.analysis.run import analyse

    request = Request((str(folder),))
    try:
        return analyse(request, request.files())
    except DataError:
        return None


def nonfinite(scalars: Series) -> list[str]:
    """Names with a value that is NaN or infinite."""
    return [name for name, values in scalars.items() if not all(map(math.isfinite, values.values()))]


def cause_of(log: str) -> str:
    """The last exception in a log as ``Type: message (file:line)``, or its last line.

    >>> cause_of('Traceback (most recent call last):\\n  File "a.py", line 3, in f\\nValueError: no\\n')
    'ValueError: no (a.py:3)'
    """
    lines = [COLOUR.sub("", PREFIX.sub("", line)) for line in log.splitlines()]
    found = _last(lines, own=True) or _last(lines, own=False)
    if found is None:
        return next((line.strip() for line in reversed(lines) if line.strip()), "the log is empty")[:LONGEST]
    at, text = found
    frames = (FRAME.match(line) for line in reversed(lines[max(0, at - 60) : at]))
    frame = next(filter(None, frames), None)
    return f"{text[:LONGEST]}{f' ({frame[1]}:{frame[2]})' if frame else ''}"


def _last(lines: Sequence[str], *, own: bool) -> tuple[int, str] | None:
    """Line number and text of the last exception; of Ray's only where ``own`` is false."""
    for at in range(len(lines) - 1, -1, -1):
        if match := REFUSED.match(lines[at]):
            return at, match[1]
        if (match := RAISED.match(lines[at])) and (match[1] not in OF_RAY or not own):
            message = match[2] or next((line.strip() for line in lines[at + 1 :] if line.strip()), "")
            return at, f"{match[1]}: {message}" if message else match[1]
    return None
