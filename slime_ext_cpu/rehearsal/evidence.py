"""What a rehearsal left behind: recorded calls, dumps, TensorBoard, checkpoint, log."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_ext.errors import DataError
from slime_ext.tools.analysis.readers.unpickle import load_plain
from slime_ext.tools.report.run_series import Series, read_events
from slime_ext_cpu.host_log import ending
from slime_ext_cpu.rehearsal import observe

if TYPE_CHECKING:
    from slime_ext.tools.analysis.document import Document


NEAR = 0.02  # nats: mean |trainer - sampler| below which both have the same weights in bfloat16
GROWN = 3.0  # times the distance of the first rollout from which the engine's weights are older ones


@dataclass(frozen=True)
class Pushes:
    """The weights that were pushed, and those that sampled.

    Args:
        versions: pushed, sorted.
        sampled: versions by rollout.
        distances: mean |trainer - sampler| by rollout, nats per token, where it is known.
    """

    versions: Sequence[int]
    sampled: Sequence[Sequence[Any]]
    distances: Sequence[float]

    def __str__(self) -> str:
        sampled = ", ".join("/".join(map(str, versions)) or "unknown" for versions in self.sampled)
        text = f"versions {self.versions[0]} to {self.versions[-1]}; rollouts sampled with {sampled}"
        distances = ", ".join(f"{distance:.4f}" for distance in self.distances)
        return text + (f"; mean |trainer - sampler| {distances} nats" if distances else "")

    @property
    def arrived(self) -> bool:
        """Whether the last rollout was sampled with newer weights than the first one."""
        first, last = self.sampled[0], self.sampled[-1]
        is_still = len(self.sampled) > 1 and first == last and bool(first)
        is_stale = len(self.distances) > 1 and self.distances[-1] > max(NEAR, GROWN * self.distances[0])
        return not (is_still or is_stale)


@dataclass(frozen=True)
class HookCalls:
    """Calls of the policy loss hook."""

    calls: Sequence[Mapping[str, Any]]

    def __str__(self) -> str:
        of_one = [call for call in self.calls if call["pid"] == self.calls[0]["pid"]]  # each rank sees all
        sequences, tokens = (sum(call[name] for call in of_one) for name in ("sequences", "tokens"))
        ranks = len({call["pid"] for call in self.calls})
        where = f"{len(of_one)} times on {ranks} rank{'s' * (ranks > 1)}"
        return f"{where} with {sequences} sequences, {tokens} tokens"

    @property
    def lacking(self) -> int:
        """Calls without log-probs of the sampler or the trainer."""
        return sum("tokens" not in call for call in self.calls)

    @property
    def nonfinite(self) -> int:
        """Log-ratios that are NaN or infinite."""
        return sum(call["nonfinite"] for call in self.calls)

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics that the last call returned."""
        return list(self.calls[-1]["names"])


@dataclass(frozen=True)
class Evidence:
    """All that the page is made from.

    Args:
        status: exit status of the run.
        seconds: how long it took.
        log: path.
        cause: what ended the run, where the status is not 0.
        events: recorded calls.
        rollouts: samples by rollout, as the host dumped them.
        analysis: of the dumps, None where there were none.
        scalars: by name, what TensorBoard holds.
        checkpoint: files and their bytes.
        unread: dumps that could not be read, each with why.
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
    unread: Sequence[str] = ()

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

    def hook(self) -> HookCalls:
        """Calls of the launch's own hook, else of the host's."""
        path = self.parsed.get("custom_tis_function_path")
        own = [call for call in self.calls("function") if path and call["path"] == path]
        return HookCalls(own or self.calls("vanilla"))

    def pushes(self) -> Pushes:
        """What the engine was given, and what it sampled with."""
        versions = sorted({e["version"] for e in self.calls("push") if e["version"] is not None})
        sampled = [
            sorted({version for sample in rollout for version in sample["weight_versions"] or ()})
            for rollout in self.rollouts.values()
        ]
        timeline = self.analysis.timeline if self.analysis else ()
        distances = [m.numbers.absolute for m in timeline if m.numbers.absolute is not None]
        return Pushes(versions, sampled, distances)

    def errors(self) -> list[Mapping[str, Any]]:
        """Calls that raised, the innermost first."""
        return [e for e in self.events if "error" in e]


def gather(out: Path, status: int, seconds: float) -> Evidence:
    """Reads a rehearsal's folder."""
    log = out / "log"
    rollouts, unread = _rollouts(out / "dumps/rollout_data")
    files = {
        str(f.relative_to(out)): f.stat().st_size for f in (out / "checkpoint").rglob("*") if f.is_file()
    }
    return Evidence(
        status, seconds, log, ending(status, log) if status else "", tuple(observe.read(out / "events")),
        rollouts, _analysis(out / "dumps"), read_events(out / "tensorboard"), files, unread,
    )  # fmt: skip


def _rollouts(folder: Path) -> tuple[dict[int, Sequence[Mapping[str, Any]]], list[str]]:
    """Samples by rollout, and a line for each dump that could not be read; nothing in a dump is run."""
    found, unread = {}, []
    for file in sorted(file for file in folder.glob("*.pt") if file.stem.isdigit()):
        try:
            found[int(file.stem)] = load_plain(file).get("samples", ())
        except DataError as error:
            unread.append(f"{file}: {error}")
    return found, unread


def _analysis(folder: Path) -> Document | None:
    """The analysis of ``slime-ext analyze`` over the dumps."""
    from slime_ext.tools.analysis.request import Request
    from slime_ext.tools.analysis.run import analyse

    request = Request((str(folder),))
    try:
        return analyse(request, request.files())
    except DataError:
        return None


def nonfinite(scalars: Series) -> list[str]:
    """Names with a value that is NaN or infinite."""
    return [name for name, values in scalars.items() if not all(map(math.isfinite, values.values()))]
