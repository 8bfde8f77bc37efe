"""The rollouts of the files that were found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from slime_ext.analysis.document import Skipped
from slime_ext.analysis.readers.dumps import read_job
from slime_ext.analysis.readers.find import Job, RolloutRanges, find
from slime_ext.analysis.readers.jsonl import read_jsonl
from slime_ext.analysis.records import DumpedRollout


def read(paths: Iterable[str | Path], rollouts: str | None = None) -> Iterator[DumpedRollout | Skipped]:
    """Every rollout of the files, in order; what cannot be read comes as ``Skipped`` in its place.

    Args:
        paths: directories (a --dump-details folder, a run of the launcher), files, or glob patterns.
        rollouts: numbers and ranges of rollouts, such as ``100-200`` or ``0,5,10-``; None for all.

    Raises:
        DataError: a path does not exist, holds no dump, or the range is none.
    """
    wanted = RolloutRanges.parse(rollouts)
    for job in find(paths, wanted).jobs:
        yield from load(job, wanted)


def load(job: Job, wanted: RolloutRanges | None = None) -> Iterator[DumpedRollout | Skipped]:
    """The rollouts of one job's files: one, but for JSONL."""
    wanted = wanted or RolloutRanges()
    for found in read_jsonl(job.paths[0]) if job.is_jsonl else read_job(job):
        if isinstance(found, Skipped):
            yield found
        elif found.rollout_id in wanted:
            yield replace(found, run=job.run)
