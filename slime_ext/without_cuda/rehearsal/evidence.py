"""What a rehearsal left behind: recorded calls, dumps, TensorBoard, checkpoint, log."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_ext.errors import DataError
from slime_ext.without_cuda.rehearsal import failure, observe

if TYPE_CHECKING:
    from slime_ext.analysis.document import Document


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
    scalars: Mapping[str, Sequence[float]] = field(default_factory=dict)
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
        status, seconds, log, failure.cause(text) if status else "", tuple(observe.read(out / "events")),
        _rollouts(out / "dumps/rollout_data"), _analysis(out / "dumps"), _scalars(out / "tensorboard"), files,
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


def _scalars(folder: Path) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[float]] = {}
    for place in sorted({file.parent for file in folder.rglob("events.out.tfevents.*")}):
        events = EventAccumulator(str(place), {"scalars": 0}).Reload()
        for name in events.Tags()["scalars"]:
            found.setdefault(name, []).extend(event.value for event in events.Scalars(name))
    return found


def nonfinite(scalars: Mapping[str, Sequence[float]]) -> list[str]:
    """Names with a value that is NaN or infinite."""
    return [name for name, values in scalars.items() if not all(map(math.isfinite, values))]
