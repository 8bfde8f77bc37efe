"""A run that is still being written: rollouts as their dumps become complete, findings as they arise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from slime_ext.errors import DataError
from slime_ext.tools.analysis.document import Document, Finding, Moment, Skipped
from slime_ext.tools.analysis.pipeline import Result, keep_tensors_off_the_heap
from slime_ext.tools.analysis.readers.find import DumpFiles, Job
from slime_ext.tools.analysis.request import Request
from slime_ext.tools.analysis.run import collectors_of, document_of

ARGS = "args.json"  # of a run of slime-ext train
Signature = tuple[tuple[str, int, int], ...]  # path, bytes and time of writing of each of a job's files


@dataclass(frozen=True)
class News:
    """Rollouts that were read (one, but of a file that holds several), and the findings that were not there
    before, or less grave."""

    moments: tuple[Moment, ...]
    alerts: tuple[Finding, ...]


@dataclass
class Follower:
    """Reads the rollouts of a folder that grows, each of them once.

    A rollout is read when its train dump is there and its files have not changed between two looks. One that
    could not be read is tried again when its files change.
    """

    request: Request
    result: Result = field(init=False)
    found: DumpFiles = field(default_factory=lambda: DumpFiles((), 0))
    seen: dict[Path, Signature] = field(default_factory=dict)  # first file of a job -> as of the last look
    taken: set[Path] = field(default_factory=set)  # files that were read
    failed: dict[Path, tuple[Signature, list[Skipped]]] = field(default_factory=dict)  # by the first file
    alerted: dict[str, int] = field(default_factory=dict)  # name of a finding -> its rank then

    def __post_init__(self) -> None:
        keep_tensors_off_the_heap()
        self.result = Result(collectors_of(self.request))

    def look(self) -> Iterator[News]:
        """The rollouts that have become complete since the last look, in their order."""
        with suppress(DataError):  # nothing has been written yet
            self.found = self.request.files()
        for job in self.found.jobs:
            if self._is_complete(job):
                yield from self._read(job)

    def _is_complete(self, job: Job) -> bool:
        first = job.paths[0]
        try:
            signature = tuple((str(p), (s := p.stat()).st_size, s.st_mtime_ns) for p in job.paths)
        except OSError:  # replaced at this moment
            return False
        before, self.seen[first] = self.seen.get(first), signature
        is_new = not self.taken.intersection(job.paths) and self.failed.get(first, ((),))[0] != signature
        is_trained = any(path.parent.name != "rollout_data" for path in job.paths)
        return is_new and is_trained and before == signature

    def _read(self, job: Job) -> Iterator[News]:
        first, skipped = job.paths[0], len(self.result.skipped)
        timeline = self.result.collectors["diagnosis"].timeline
        before = len(timeline)
        self.result.read(job)
        if len(timeline) == before:  # to be tried again, so that nothing is said of it but at the end
            self.failed[first] = self.seen[first], self.result.skipped[skipped:]
            del self.result.skipped[skipped:]
            return
        self.failed = {path: why for path, why in self.failed.items() if path not in job.paths}
        self.taken.update(job.paths)
        new = tuple(f for f in self.document().findings if f.rank < self.alerted.get(f.name, f.rank + 1))
        self.alerted |= {finding.name: finding.rank for finding in new}
        yield News(tuple(timeline[before:]), new)

    def document(self) -> Document:
        """What follows from all rollouts so far; what could not be read is left out of it by name.

        Raises:
            DataError: there is none.
        """
        if not self.result.rollouts:
            raise DataError(f"{self.request.paths[0]}: expected a rollout, got none that could be read")
        unread = [one for _, skipped in self.failed.values() for one in skipped]
        result = replace(self.result, skipped=[*self.result.skipped, *unread])
        return document_of(self.request, self.found, result)

    def has_ended(self) -> bool:
        """Whether the last rollout of a run of slime-ext train was read; of another host nobody can say."""
        given = Path(self.request.paths[0])  # the run's folder, or its dump
        for path in (given / ARGS, given.parent / ARGS):
            with suppress(OSError, ValueError, KeyError, TypeError):
                last = int(json.loads(path.read_text())["num_rollout"]) - 1
                timeline = self.result.collectors["diagnosis"].timeline
                return any(moment.rollout_id >= last for moment in timeline)
        return False
