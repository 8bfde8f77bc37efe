"""Follows a run that is still being written.

Reads each rollout once its dumps are complete, and reports new findings.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from slime_ext.errors import DataError
from slime_ext.tools.analysis.document import Document, Finding, Moment, Skipped
from slime_ext.tools.analysis.pipeline import Result, keep_tensors_off_the_heap
from slime_ext.tools.analysis.readers.find import DumpFiles, Job, NoDumps
from slime_ext.tools.analysis.readers.flags import files_of_flags
from slime_ext.tools.analysis.readers.vocabulary import read_json
from slime_ext.tools.analysis.request import Request
from slime_ext.tools.analysis.run import collectors_of, document_of

LATE = "has changed since it was read: type analyze without --follow when the run has ended"
Signature = tuple[tuple[str, int, int], ...]  # path, bytes and modification time of each file of a job


@dataclass(frozen=True)
class News:
    """Rollouts that were just read, and the findings that are new or have become more severe.

    There is one rollout, except if a file holds several.
    """

    moments: tuple[Moment, ...]
    alerts: tuple[Finding, ...]


@dataclass
class Follower:
    """Reads the rollouts of a growing folder, each of them once.

    A rollout is read if it has a train dump, and if its files have not changed between two calls of ``look``.
    If it could not be read, it is tried again when its files change. What is added to a rollout that was read
    is not read, and the document says so.
    """

    request: Request
    result: Result = field(init=False)
    dumps: DumpFiles = field(default_factory=lambda: DumpFiles((), 0))
    seen: dict[Path, Signature] = field(default_factory=dict)  # first file -> signature at the last look
    taken: dict[Path, Signature] = field(default_factory=dict)  # file that was read -> signature of its job
    late: dict[Path, Skipped] = field(default_factory=dict)  # first file of a job that has changed since
    failed: dict[Path, tuple[Signature, list[Skipped]]] = field(
        default_factory=dict
    )  # first file of a job -> signature, reasons
    alerted: dict[str, int] = field(default_factory=dict)  # name of a finding -> rank that was reported

    def __post_init__(self) -> None:
        keep_tensors_off_the_heap()
        self.result = Result(collectors_of(self.request))

    def look(self) -> Iterator[News]:
        """Yields the rollouts that have become complete since the last look, in order.

        Raises:
            DataError: the request cannot be met, or a JSONL file that was read has grown.
        """
        with suppress(NoDumps):
            self.dumps = self.request.files()
        for job in self.dumps.jobs:
            if self._is_complete(job):
                yield from self._read(job)

    def _is_complete(self, job: Job) -> bool:
        """Returns whether the files of a job have not changed since the last look, and were not read yet.

        Notes a rollout that grew after it was read; raises DataError if it is in a JSONL file.
        """
        first = job.paths[0]
        try:
            signature = tuple((str(p), (s := p.stat()).st_size, s.st_mtime_ns) for p in job.paths)
        except OSError:  # the file is being replaced
            return False
        before, self.seen[first] = self.seen.get(first), signature
        if known := [self.taken[path] for path in job.paths if path in self.taken]:
            if signature not in known and before == signature:
                if job.is_jsonl:
                    raise DataError(
                        f"{job}: expected a JSONL file that is complete, got a file that grows: write a file "
                        "per rollout, or type analyze without --follow when the run has ended"
                    )
                self.late[first] = Skipped(str(job), LATE)
            return False
        is_new = self.failed.get(first, ((),))[0] != signature
        is_trained = any(path.parent.name != "rollout_data" for path in job.paths)
        return is_new and is_trained and before == signature

    def _read(self, job: Job) -> Iterator[News]:
        first, skipped = job.paths[0], len(self.result.skipped)
        timeline = self.result.collectors["diagnosis"].timeline
        before = len(timeline)
        self.result.read(job)
        self.result.finish()
        if len(timeline) == before:  # it is tried again later, and reported only at the end
            self.failed[first] = self.seen[first], self.result.skipped[skipped:]
            del self.result.skipped[skipped:]
            return
        self.failed = {path: why for path, why in self.failed.items() if path not in job.paths}
        self.taken |= dict.fromkeys(job.paths, self.seen[first])
        new = tuple(f for f in self.document().findings if f.rank < self.alerted.get(f.name, f.rank + 1))
        self.alerted |= {finding.name: finding.rank for finding in new}
        yield News(tuple(timeline[before:]), new)

    def document(self) -> Document:
        """Returns the document of all rollouts so far, which lists the files that could not be read.

        Raises:
            DataError: no rollout could be read.
        """
        if not self.result.rollouts:
            raise DataError(f"{self.request.paths[0]}: expected a rollout, got none that could be read")
        unread = [skip for _, skipped in self.failed.values() for skip in skipped]
        result = replace(self.result, skipped=[*self.result.skipped, *unread, *self.late.values()])
        return document_of(self.request, self.dumps, result)

    def has_ended(self) -> bool:
        """Returns whether the last rollout of a run of slime-ext train was read. False for other hosts."""
        for path in files_of_flags(self.request.paths[:1]):
            with suppress(ValueError, KeyError, TypeError):
                last = int(read_json(path)["num_rollout"]) - 1
                timeline = self.result.collectors["diagnosis"].timeline
                return any(moment.rollout_id >= last for moment in timeline)
        return False
