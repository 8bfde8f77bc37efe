"""Reads a run rollout by rollout and passes each rollout to collectors.

A collector keeps sums, not rollouts, so memory does not grow with the run. Every process fills separate
collectors, which are merged at the end.
"""

from __future__ import annotations

import copy
import ctypes
import multiprocessing
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import field
from functools import partial
from typing import Any, Protocol

import torch

from slime_ext.errors import DataError
from slime_ext.tools import collection
from slime_ext.tools.analysis.document import Skipped
from slime_ext.tools.analysis.readers.dumps import read_job
from slime_ext.tools.analysis.readers.find import Job
from slime_ext.tools.analysis.readers.jsonl import read_jsonl
from slime_ext.tools.analysis.records import DumpedRollout, form_of, join
from slime_ext.tools.analysis.tables import Additive

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
JOINED = 1 << 16  # tokens of small rollouts that are read in one pass; each pass has a fixed cost
SHARES = 4  # shares per process; more would pass more data around, fewer would let processes wait


def load(job: Job) -> Iterator[DumpedRollout | Skipped]:
    """Yields the rollouts of a job's files, wanted or not, and what had to be skipped."""
    yield from read_jsonl(job.paths[0]) if job.is_jsonl else read_job(job)


class Collector(Protocol):
    """Receives rollouts, some of them joined (``records.join``), and keeps the sums that it needs."""

    def add(self, rollout: DumpedRollout) -> None: ...

    def merge(self, other: Any) -> None: ...


class Result(Additive):
    """The filled collectors, and what had to be left out."""

    collectors: dict[str, Any]
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)  # file, remark
    rollouts: int = 0
    unwanted: list[int] = field(default_factory=list)  # numbers of the rollouts that no collector got
    waiting: list[DumpedRollout] = field(default_factory=list)  # small ones, for others to be joined with

    def read(self, job: Job) -> None:
        """Passes the wanted rollouts of a job's files to every collector. Small ones wait for ``finish``."""
        with collection.paused():  # a search would look at each of a file's lists again and again
            self._read(job)
        _glibc("malloc_trim", 0)  # returns what was freed in pieces too small for tensors

    def _read(self, job: Job) -> None:
        item: DumpedRollout | Skipped | None
        for item in load(job):
            if isinstance(item, Skipped):
                self.skipped.append(item)
            elif item.rollout_id not in job.wanted:
                self.unwanted.append(item.rollout_id)
            else:
                self.rollouts += 1
                self.notes += [(item.source, note) for note in item.notes]
                self._take(item)
            item = None  # frees the rollout before the next one is read

    def _take(self, rollout: DumpedRollout) -> None:
        """Keeps the order: a rollout that cannot be joined with those that wait follows them."""
        tokens = sum(one.size for one in self.waiting)
        is_alike = bool(self.waiting) and form_of(self.waiting[0]) == form_of(rollout)
        if not is_alike or tokens + rollout.size > JOINED:
            self.finish()
        self.waiting.append(rollout)
        if not 0 < rollout.size <= JOINED // 2:
            self.finish()

    def finish(self) -> None:
        """Passes the rollouts that wait to every collector."""
        rollouts, self.waiting = self.waiting, []
        if rollouts:
            joined = join(rollouts)
            for collector in self.collectors.values():
                collector.add(joined)


def collect(
    jobs: Sequence[Job],
    collectors: Mapping[str, Collector],
    *,
    processes: int = 1,
    done: Callable[[Job], None] = lambda job: None,
) -> Result:
    """Passes every rollout of the jobs to the collectors, which the result then holds.

    Args:
        jobs: from ``readers.find``.
        collectors: name -> an empty collector.
        processes: how many read at once; each holds one rollout in memory.
        done: is called in this process after each job.

    Raises:
        DataError: a process was killed, most often because memory ran out.
    """
    keep_tensors_off_the_heap()
    result = Result(dict(collectors))
    if min(processes, len(jobs)) <= 1:
        for job in jobs:
            result.read(job)
            done(job)
        result.finish()
    else:
        for share, other in _in_processes(jobs, copy.deepcopy(result), min(processes, len(jobs))):
            result.merge(other)
            for job in share:
                done(job)
    result.skipped.sort(key=lambda skipped: _in_numbers(skipped.path))
    result.notes.sort(key=lambda note: (_in_numbers(note[0]), note[1]))
    return result


def _in_numbers(path: str) -> list[str | int]:
    """Returns a sort key that puts 2.pt before 10.pt."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path)]


def _glibc(name: str, *numbers: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*numbers)


def keep_tensors_off_the_heap() -> None:
    """Makes malloc map large tensors separately, so that freed memory returns to the system.

    Large are those of a large rollout. A table of a part has up to 6 MiB, and mapping it would take longer.
    The end of the heap stays, because the next row needs it: returning it and mapping it again took a quarter
    of all time.
    """
    _glibc("mallopt", M_TRIM_THRESHOLD, 16 << 20)
    _glibc("mallopt", M_MMAP_THRESHOLD, 8 << 20)


def use_one_thread() -> None:
    """Makes torch compute in the calling thread.

    A part of a rollout is too small for several threads, which would wait for each other in busy loops. Type
    --jobs to use more cores.
    """
    torch.set_num_threads(1)


def _in_processes(jobs: Sequence[Job], empty: Result, count: int) -> Iterator[tuple[Sequence[Job], Result]]:
    shares = [jobs[i :: SHARES * count] for i in range(min(len(jobs), SHARES * count))]
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer=_start) as pool:
        try:
            yield from zip(shares, pool.map(partial(_read_share, empty), shares), strict=True)
        except BrokenProcessPool:
            raise DataError(
                "--jobs: expected every process to finish, got a killed process, most often because "
                "memory ran out: type a smaller number"
            ) from None


def _start() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it silently
    use_one_thread()
    keep_tensors_off_the_heap()


def _read_share(empty: Result, jobs: Sequence[Job]) -> Result:
    # Tensors of ``empty`` lie in shared memory. A share that added to them in place would change them for the
    # shares after it, so each share fills a copy.
    result = copy.deepcopy(empty)
    for job in jobs:
        result.read(job)
    result.finish()
    return result
