"""The files of a run through collectors, in this process or in several.

A collector has ``add(rollout)`` and ``merge(other)`` and travels between processes; each process has its own
and they are merged at the end, so that memory does not grow with the run.
"""

from __future__ import annotations

import copy
import ctypes
import multiprocessing
import pickle
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty
from typing import Any, Protocol

import torch

from slime_ext.analysis.readers import Job, Wanted
from slime_ext.analysis.readers.stream import load
from slime_ext.analysis.records import Rollout, Skipped
from slime_ext.errors import DataError

M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
ALIVE = 1.0  # seconds between looks at processes that say nothing


class Collector(Protocol):
    """Something that looks at rollouts one by one and adds up."""

    def add(self, rollout: Rollout) -> None: ...

    def merge(self, other: Any) -> None: ...


@dataclass
class Result:
    """What became of the files."""

    collectors: dict[str, Any]
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rollouts: int = 0

    def add(self, found: Rollout | Skipped) -> None:
        """Shows a rollout to every collector, or remembers why there is none."""
        if isinstance(found, Skipped):
            self.skipped.append(found)
            return
        self.rollouts += 1
        self.notes += [f"{found.source}: {note}" for note in found.notes]
        for collector in self.collectors.values():
            collector.add(found)

    def merge(self, other: Result) -> None:
        """Adds what another process found."""
        for name, collector in self.collectors.items():
            collector.merge(other.collectors[name])
        self.skipped += other.skipped
        self.notes += other.notes
        self.rollouts += other.rollouts


def collect(
    jobs: Sequence[Job],
    collectors: Mapping[str, Collector],
    *,
    wanted: Wanted | None = None,
    processes: int = 1,
    done: Callable[[Job], None] = lambda job: None,
) -> Result:
    """Every rollout of the jobs through copies of the collectors.

    Args:
        jobs: from ``readers.find``.
        collectors: name -> an empty one.
        wanted: rollouts to look at.
        processes: how many read at once; memory is this many of the largest rollout.
        done: called here after each job.

    Raises:
        DataError: a process was killed (most often: no memory left).
    """
    _large_apart()
    result = Result({name: copy.deepcopy(empty) for name, empty in collectors.items()})
    if min(processes, len(jobs)) <= 1:
        for job in jobs:
            _read(result, job, wanted)
            done(job)
    else:
        for other in _from_processes(jobs, result, wanted, min(processes, len(jobs)), done):
            result.merge(other)
    result.skipped.sort(key=lambda s: _in_numbers(s.path))
    result.notes.sort()
    return result


def _in_numbers(path: str) -> list[str | int]:
    """A key that sorts 2.pt before 10.pt, and so lines of a file."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path)]


def _read(result: Result, job: Job, wanted: Wanted | None) -> None:
    found: Rollout | Skipped | None
    for found in load(job, wanted):
        result.add(found)
        found = None  # the next one is read when this one is gone
    _glibc("malloc_trim", 0)  # what Python freed


def _glibc(name: str, *numbers: int) -> None:
    """Calls a function of the C library, where it has it."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*numbers)


def _large_apart() -> None:
    """Tensors from 4 MB on lie outside the heap: freed memory is gone, instead of holes among what stays."""
    _glibc("mallopt", M_MMAP_THRESHOLD, 4 << 20)


def _from_processes(
    jobs: Sequence[Job], empty: Result, wanted: Wanted | None, count: int, done: Callable[[Job], None]
) -> Iterator[Result]:
    context = multiprocessing.get_context("spawn")
    asked, answers = context.Queue(), context.Queue()
    begin = pickle.dumps((list(jobs), empty, wanted))  # by value: a tensor in a queue is shared memory
    for index in [*range(len(jobs)), *[None] * count]:
        asked.put(index)
    workers = [context.Process(target=_work, args=(begin, asked, answers), daemon=True) for _ in range(count)]
    for worker in workers:
        worker.start()
    try:
        left = count
        while left:
            answer = _next(answers, workers)
            if isinstance(answer, int):
                done(jobs[answer])
                continue
            found = pickle.loads(answer)
            if isinstance(found, BaseException):
                raise found
            left -= 1
            yield found
    finally:
        for worker in workers:
            worker.terminate()


def _next(answers: Any, workers: Sequence[Any]) -> Any:
    while True:
        try:
            return answers.get(timeout=ALIVE)
        except Empty:
            dead = [w.exitcode for w in workers if w.exitcode not in (None, 0)]
            if dead:
                raise DataError(
                    f"--jobs: expected every process to finish, got one with status {dead[0]}: give fewer"
                ) from None


def _work(begin: bytes, asked: Any, answers: Any) -> None:
    """One process: jobs as they are free, then everything that was added up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this one
    jobs, result, wanted = pickle.loads(begin)
    torch.set_num_threads(1)
    _large_apart()
    try:
        while (index := asked.get()) is not None:
            _read(result, jobs[index], wanted)
            answers.put(index)
        answers.put(pickle.dumps(result))
    except Exception as error:
        answers.put(pickle.dumps(error))
