"""Reads a run's files rollout by rollout and shows each rollout to collectors, in one process or in several.

A collector adds up what it sees and forgets the rollout, so memory does not grow with the run. Every process
has collectors of its own, which are merged at the end.
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
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from slime_ext.errors import DataError
from slime_ext.tools.analysis.document import Skipped
from slime_ext.tools.analysis.readers.dumps import read_job
from slime_ext.tools.analysis.readers.find import Job
from slime_ext.tools.analysis.readers.jsonl import read_jsonl
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import Additive

M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
SHARES = 4  # of the jobs per process: few, so that little is passed around, yet no process waits long


def load(job: Job) -> Iterator[DumpedRollout | Skipped]:
    """The wanted rollouts of a job's files, and what had to be skipped."""
    for found in read_jsonl(job.paths[0]) if job.is_jsonl else read_job(job):
        if isinstance(found, Skipped) or found.rollout_id in job.wanted:
            yield found


class Collector(Protocol):
    """Is shown rollouts one by one and adds up what it needs of them."""

    def add(self, rollout: DumpedRollout) -> None: ...

    def merge(self, other: Any) -> None: ...


@dataclass
class Result(Additive):
    """The collectors after all files were read, and what had to be left out."""

    collectors: dict[str, Any]
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)  # file, remark
    rollouts: int = 0

    def read(self, job: Job) -> None:
        """Shows the rollouts of a job's files to every collector."""
        found: DumpedRollout | Skipped | None
        for found in load(job):
            if isinstance(found, Skipped):
                self.skipped.append(found)
            else:
                self.rollouts += 1
                self.notes += [(found.source, note) for note in found.notes]
                for collector in self.collectors.values():
                    collector.add(found)
            found = None  # freed before the next one is read
        _glibc("malloc_trim", 0)


def collect(
    jobs: Sequence[Job],
    collectors: Mapping[str, Collector],
    *,
    processes: int = 1,
    done: Callable[[Job], None] = lambda job: None,
) -> Result:
    """Shows every rollout of the jobs to copies of the collectors.

    Args:
        jobs: from ``readers.find``.
        collectors: name -> an empty one.
        processes: how many read at once; memory is this many of the largest rollout.
        done: called here after each job.

    Raises:
        DataError: a process was killed (most often: no memory left).
    """
    keep_tensors_off_the_heap()
    result = Result({name: copy.deepcopy(empty) for name, empty in collectors.items()})
    if min(processes, len(jobs)) <= 1:
        for job in jobs:
            result.read(job)
            done(job)
    else:
        for share, other in _in_processes(jobs, copy.deepcopy(result), min(processes, len(jobs))):
            result.merge(other)
            for job in share:
                done(job)
    result.skipped.sort(key=lambda skipped: _in_numbers(skipped.path))
    result.notes.sort(key=lambda note: (_in_numbers(note[0]), note[1]))
    return result


def _in_numbers(path: str) -> list[str | int]:
    """A sort key that puts 2.pt before 10.pt."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path)]


def _glibc(name: str, *numbers: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*numbers)


def keep_tensors_off_the_heap() -> None:
    """Lets malloc map tensors of 4 MB and more one by one, so that their memory returns to the system."""
    _glibc("mallopt", M_MMAP_THRESHOLD, 4 << 20)


def _in_processes(jobs: Sequence[Job], empty: Result, count: int) -> Iterator[tuple[Sequence[Job], Result]]:
    shares = [jobs[i :: SHARES * count] for i in range(min(len(jobs), SHARES * count))]
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer=_start) as pool:
        try:
            yield from zip(shares, pool.map(partial(_read_share, empty), shares), strict=True)
        except BrokenProcessPool:
            raise DataError(
                "--jobs: expected every process to finish, got one that was killed, most often for "
                "lack of memory: give fewer"
            ) from None


def _start() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it silently
    torch.set_num_threads(1)
    keep_tensors_off_the_heap()


def _read_share(empty: Result, jobs: Sequence[Job]) -> Result:
    # A tensor comes from the other process in shared memory: what a share adds in place to one of ``empty``
    # would be counted by the shares after it, too.
    result = copy.deepcopy(empty)
    for job in jobs:
        result.read(job)
    return result
