"""A run that is still being written: rollouts as their dumps become complete, findings as they arise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from slime_ext.errors import DataError
from slime_ext.tools.analysis.document import Document, Finding, Moment
from slime_ext.tools.analysis.pipeline import Result, keep_tensors_off_the_heap
from slime_ext.tools.analysis.readers.find import DumpFiles, Job
from slime_ext.tools.analysis.request import Request
from slime_ext.tools.analysis.run import collectors_of, document_of

ARGS = "args.json"  # of a run of slime-ext train
Signature = tuple[tuple[str, int, int], ...]  # path, bytes and time of writing of each of a job's files


@dataclass(frozen=True)
class News:
    """Rollouts that were read (one, but of a file that holds several), and the findings that were not there
    before."""

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
    seen: dict[Path, Signature] = field(default_factory=dict)  # first file of a job -> as of the last look
    taken: set[Path] = field(default_factory=set)  # files that were read
    failed: dict[Signature, list] = field(default_factory=dict)
    alerted: set[str] = field(default_factory=set)
    found: DumpFiles = field(default_factory=lambda: DumpFiles((), 0))

    def __post_init__(self) -> None:
        keep_tensors_off_the_heap()
        self.result = Result(collectors_of(self.request))

    def look(self) -> Iterator[News]:
        """The rollouts that have become complete since the last look, in their order."""
        try:
            self.found = self.request.files()
        except DataError:  # nothing has been written yet
            return
        for job in self.found.jobs:
            if self._is_complete(job):
                yield from self._read(job)

    def _is_complete(self, job: Job) -> bool:
        try:
            signature = tuple((str(p), (s := p.stat()).st_size, s.st_mtime_ns) for p in job.paths)
        except OSError:  # replaced at this moment
            return False
        before, self.seen[job.paths[0]] = self.seen.get(job.paths[0]), signature
        is_new = not self.taken.intersection(job.paths) and signature not in self.failed
        is_trained = not all(path.parent.name == "rollout_data" for path in job.paths)
        return is_new and is_trained and before == signature

    def _read(self, job: Job) -> Iterator[News]:
        known, skipped = self.result.rollouts, len(self.result.skipped)
        before = len(self.result.collectors["diagnosis"].timeline)
        self.result.read(job)
        if self.result.rollouts == known:  # to be tried again, so that nothing is said of it but at the end
            self.failed[self.seen[job.paths[0]]] = self.result.skipped[skipped:]
            del self.result.skipped[skipped:]
            return
        self.taken.update(job.paths)
        read = self.result.collectors["diagnosis"].timeline[before:]
        document = self.document()
        new = tuple(finding for finding in document.findings if finding.name not in self.alerted)
        self.alerted.update(finding.name for finding in new)
        yield News(tuple(read), new)

    def document(self) -> Document:
        """What follows from all rollouts so far; what could not be read, and has not changed since, is left
        out of it by name.

        Raises:
            DataError: there is none.
        """
        if not self.result.rollouts:
            raise DataError(f"{self.request.paths[0]}: expected a rollout, got none that could be read")
        unread = [s for signature, skipped in self.failed.items() if self._still(signature) for s in skipped]
        result = replace(self.result, skipped=[*self.result.skipped, *unread])
        return document_of(self.request, self.found, result)

    def _still(self, signature: Signature) -> bool:
        return signature in self.seen.values() and not self.taken.intersection(Path(p) for p, *_ in signature)

    def has_ended(self) -> bool:
        """Whether the last rollout of a run of slime-ext train was read; of another host nobody can say."""
        try:
            dump = Path(self.request.paths[0])  # the run's folder, or its dump
            args = next(folder / ARGS for folder in (dump, dump.parent) if (folder / ARGS).is_file())
            wanted = json.loads(args.read_text())["num_rollout"]
            ids = [moment.rollout_id for moment in self.result.collectors["diagnosis"].timeline]
            return bool(ids) and max(ids) >= int(wanted) - 1
        except (OSError, ValueError, KeyError, TypeError, StopIteration):
            return False
