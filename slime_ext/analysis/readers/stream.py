"""The rollouts of the files that were found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from slime_ext.analysis.document import Skipped
from slime_ext.analysis.readers.dumps import read_job
from slime_ext.analysis.readers.find import Job, RolloutRanges
from slime_ext.analysis.readers.jsonl import read_jsonl
from slime_ext.analysis.records import DumpedRollout


def load(job: Job, wanted: RolloutRanges | None = None) -> Iterator[DumpedRollout | Skipped]:
    """The rollouts of one job's files: one, or several of a JSONL file."""
    wanted = wanted or RolloutRanges()
    for found in read_jsonl(job.paths[0]) if job.is_jsonl else read_job(job):
        if isinstance(found, Skipped):
            yield found
        elif found.rollout_id in wanted:
            yield replace(found, run=job.run)
