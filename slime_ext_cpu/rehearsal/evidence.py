"""Collects what a rehearsal left: recorded calls, dumps, TensorBoard events, the checkpoint and the log."""

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


NEAR = 0.02  # nats: below it, mean |trainer - sampler| means that both have the same bfloat16 weights
GROWN = 3.0  # times the first rollout's distance: above it, the engine has older weights than the trainer


@dataclass(frozen=True)
class Pushes:
    """The weight versions that were pushed, and the versions that sampled.

    Args:
        versions: the pushed versions, sorted.
        sampled: for each rollout, the versions that sampled it.
        distances: for each rollout with known log-probs, mean |trainer - sampler|, nats per token.
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
        """Whether the last rollout was sampled with newer weights than the first rollout."""
        first, last = self.sampled[0], self.sampled[-1]
        is_still = len(self.sampled) > 1 and first == last and bool(first)
        is_stale = len(self.distances) > 1 and self.distances[-1] > max(NEAR, GROWN * self.distances[0])
        return not (is_still or is_stale)


@dataclass(frozen=True)
class HookCalls:
    """Calls of the policy loss hook."""

    calls: Sequence[Mapping[str, Any]]

    def __str__(self) -> str:
        # Every rank has the same calls, so we count those of the first one.
        on_first_rank = [call for call in self.calls if call["pid"] == self.calls[0]["pid"]]
        sequences, tokens = (sum(call[name] for call in on_first_rank) for name in ("sequences", "tokens"))
        ranks = len({call["pid"] for call in self.calls})
        where = f"{len(on_first_rank)} times on {ranks} rank{'s' * (ranks > 1)}"
        return f"{where} with {sequences} sequences, {tokens} tokens"

    @property
    def lacking(self) -> int:
        """Counts calls without log-probs of the sampler or the trainer."""
        return sum("tokens" not in call for call in self.calls)

    @property
    def nonfinite(self) -> int:
        """Counts log-ratios that are NaN or infinite."""
        return sum(call["nonfinite"] for call in self.calls)

    @property
    def metrics(self) -> list[str]:
        """Returns the names of the metrics that the last call returned."""
        return list(self.calls[-1]["names"])


@dataclass(frozen=True)
class Evidence:
    """All facts that the page of a rehearsal is made from.

    Args:
        status: exit status of the run.
        seconds: duration of the run.
        log: path of the host's log.
        cause: what ended the run, if the status is not 0.
        events: recorded calls.
        rollouts: for each rollout, its samples as the host dumped them.
        analysis: analysis of the dumps, or None if there are none.
        scalars: series of TensorBoard by name.
        checkpoint: size in bytes of each file of the checkpoint.
        unread: a line for each dump that could not be read, with the reason.
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
        """Returns the calls of one kind that did not raise."""
        return [e for e in self.events if e["event"] == event and "error" not in e]

    @property
    def parsed(self) -> Mapping[str, Any]:
        """Returns the host's arguments with the keys of --custom-config-path.

        Returns

        {} if the host did not parse them.
        """
        return (self.calls("parsed") or [{}])[-1]

    @property
    def asks_for_log_probs(self) -> bool:
        """Whether the arguments ask for the hook, which needs the sampler's log-probs."""
        return bool(self.parsed.get("use_tis") or self.parsed.get("get_mismatch_metrics"))

    def hook(self) -> HookCalls:
        """Returns the calls of the launch's hook. If there are none, those of the host's hook."""
        path = self.parsed.get("custom_tis_function_path")
        calls = [call for call in self.calls("function") if path and call["path"] == path]
        return HookCalls(calls or self.calls("vanilla"))

    def pushes(self) -> Pushes:
        """Returns the weight versions that the engine received, and the versions that it sampled with."""
        versions = sorted({e["version"] for e in self.calls("push") if e["version"] is not None})
        sampled = [
            sorted({version for sample in rollout for version in sample["weight_versions"] or ()})
            for rollout in self.rollouts.values()
        ]
        timeline = self.analysis.timeline if self.analysis else ()
        distances = [m.numbers.absolute for m in timeline if m.numbers.absolute is not None]
        return Pushes(versions, sampled, distances)

    def errors(self) -> list[Mapping[str, Any]]:
        """Returns the calls that raised, the innermost first."""
        return [e for e in self.events if "error" in e]


def gather(out: Path, status: int, seconds: float) -> Evidence:
    """Reads the evidence in a rehearsal's folder."""
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
    """Returns the samples of each rollout, and a line for each unreadable dump.

    No code in a dump is executed.
    """
    samples, unread = {}, []
    for file in sorted(file for file in folder.glob("*.pt") if file.stem.isdigit()):
        try:
            samples[int(file.stem)] = load_plain(file).get("samples", ())
        except DataError as error:
            unread.append(f"{file}: {error}")
    return samples, unread


def _analysis(folder: Path) -> Document | None:
    """Analyses the dumps as ``slime-ext analyze`` does."""
    from slime_ext.tools.analysis.request import Request
    from slime_ext.tools.analysis.run import analyse

    request = Request((str(folder),))
    try:
        return analyse(request, request.files())
    except DataError:
        return None


def nonfinite(scalars: Series) -> list[str]:
    """Returns the names of series with a value that is NaN or infinite."""
    return [name for name, values in scalars.items() if not all(map(math.isfinite, values.values()))]
