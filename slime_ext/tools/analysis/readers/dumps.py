"""Reads slime's dumps, and joins the files of a rollout by the position of each sample.

Formats: slime/observability/{rollout_data_utils,train_data_utils}.py at 624b824, and
slime/utils/train_dump_utils.py up to v0.3.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

from slime_ext.errors import DataError, cut
from slime_ext.hosts.contract import number_of
from slime_ext.tools.analysis.document import Skipped
from slime_ext.tools.analysis.fields import ROLLOUT, TRAIN
from slime_ext.tools.analysis.readers.archive import read_archive
from slime_ext.tools.analysis.readers.find import ARCHIVE, Job
from slime_ext.tools.analysis.readers.ranks import merge_ranks
from slime_ext.tools.analysis.readers.routes import compared_routes, odd_routes
from slime_ext.tools.analysis.readers.samples import (
    OF_SAMPLES,
    DumpedSample,
    Notes,
    assemble,
    columns_of,
    rollout_number,
    samples_of,
    taken_from,
)
from slime_ext.tools.analysis.readers.spilled import with_tensors
from slime_ext.tools.analysis.readers.topk import compare_heads
from slime_ext.tools.analysis.readers.unpickle import load_plain
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.values import NO_NUMBERS, as_array, whole_number

FORMAT_VERSION = 2
# Errors of files that have slime's keys, but values of another kind.
MALFORMED = (KeyError, AttributeError, IndexError, *NO_NUMBERS)
# Names in ``DumpedSample`` of the fields that the rollout dump alone holds, and of those in both dumps.
ROLLOUT_ALONE, ROLLOUT_FIRST, TRAIN_FIRST = (
    [row.one for row in OF_SAMPLES if row.dumps == dumps]
    for dumps in ((ROLLOUT,), (ROLLOUT, TRAIN), (TRAIN, ROLLOUT))
)
ABSENT = (None, "")  # values of samples without a field
BEGIN, COPIED = 4, 1e-3  # first log-probs of a sample that are compared between both dumps; nats
RANK = "rank"  # of slime v0.3.1 and older, beside ROLLOUT and TRAIN


def kind_of(content: Mapping[str, Any]) -> str:
    """Returns the kind of a file: ``rollout``, ``train`` (format version 2) or ``rank`` (v0.3.1 and older).

    Raises:
        DataError: it is none of these.
    """
    if "rollout_data" in content:
        return RANK
    if "format_version" in content:
        if content["format_version"] != FORMAT_VERSION:
            raise DataError(
                f"expected format version {FORMAT_VERSION}, got {cut(content['format_version'])}: analyze "
                "reads that version, and the per-rank files of slime v0.3.1 and older"
            )
        return TRAIN
    if "samples" not in content:
        raise DataError("expected the key samples or rollout_data, got neither: not a dump of slime")
    return ROLLOUT


@dataclass
class _Content:
    """The content of the files of a rollout, by kind."""

    rollout_id: int
    paths: list[Path] = field(default_factory=list)
    rows: dict[str, list[DumpedSample]] = field(default_factory=dict)
    ranks: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    notes: Notes = field(default_factory=Notes)

    def take(self, kind: str, content: Mapping[str, Any], path: Path) -> None:
        """Adds the content of a file.

        Raises:
            DataError: it is the second file of its kind.
        """
        if kind in self.rows:
            raise DataError(
                f"expected one {kind} dump of rollout {self.rollout_id}, got a second, which is left out: "
                "analyse the dumps of another run separately"
            )
        if kind == RANK:
            self.ranks.append((int(content.get("rank", len(self.ranks))), content["rollout_data"]))
            return
        samples = [self._with_tensors(sample, i, path) for i, sample in enumerate(content["samples"])]
        self.rows[kind] = rows_of_rollout(samples) if kind == ROLLOUT else rows_of_train(samples, content)

    def _with_tensors(self, sample: Mapping[str, Any], i: int, path: Path) -> Mapping[str, Any]:
        def failed(name: str, why: str) -> None:
            position = whole_number(sample.get("rollout_position"))
            self.notes.lack(name, i if position is None else position, why)

        return with_tensors(sample, path, failed)

    def rollout(self) -> DumpedRollout | Skipped:
        """Returns the rollout that the files hold together."""
        source = str(Job(tuple(self.paths), self.rollout_id, 0))
        try:
            rows = self.rows.get(TRAIN) or merge_ranks(self.ranks)
        except DataError as error:
            return Skipped(source, str(error))
        except MALFORMED as error:
            return Skipped(source, _of_another_kind(error))
        about, notes = self.rows.get(ROLLOUT, []), self.notes
        more_fields: dict[str, Any] = dict(_join(rows, about, notes))
        if rows:
            more_fields |= _dropped(rows, about)
            pairs = [(r, about[r.position]) for r in rows if r.position < len(about)]
            more_fields |= {"routing": odd_routes(pairs), **compared_routes(pairs)}
        return assemble(self.rollout_id, source, taken_from(rows or about), notes, **more_fields)


def read_job(job: Job) -> list[DumpedRollout | Skipped]:
    """Returns what had to be skipped, then the rollouts of a job's files.

    There are several if the file names do not tell rollouts apart.
    """
    skipped: list[DumpedRollout | Skipped] = []
    contents: dict[int, _Content] = {}
    for path in job.paths:
        try:
            _add(contents, path, job.rollout_id or 0)
        except DataError as error:
            skipped.append(Skipped(str(path), str(error)))
    usable = [c for c in contents.values() if c.rows.get(TRAIN) or c.ranks or (c.paths and not skipped)]
    return skipped + [content.rollout() for content in usable]


def _add(contents: dict[int, _Content], path: Path, number: int) -> None:
    """Reads a file and adds it to its rollout.

    Raises:
        DataError: it is no dump, or a second dump of the same rollout.
    """
    loaded = read_archive(path) if path.name.endswith(ARCHIVE) else load_plain(path)
    kind = kind_of(loaded)
    try:
        rollout_id = rollout_number(loaded.get("rollout_id", number))
        of_rollout = contents.setdefault(rollout_id, _Content(rollout_id))
        of_rollout.take(kind, loaded, path)
    except DataError:
        raise
    except MALFORMED as error:
        raise DataError(_of_another_kind(error)) from None
    of_rollout.paths.append(path)


def _of_another_kind(error: Exception) -> str:
    return f"holds values of another kind than slime's ({type(error).__name__}: {cut(error)})"


def _dropped(rows: Sequence[DumpedSample], about: Sequence[DumpedSample]) -> dict[str, Any]:
    """Returns ``dropped`` and ``why_dropped`` of ``DumpedRollout``."""
    there = {row.position for row in rows}
    gone = [s for s in about if s.position not in there and s.reward is not None]
    numbers = [(s.response_length, s.reward, s.position, _oldest(s)) for s in gone]
    dropped = torch.tensor(numbers, dtype=torch.float64).reshape(-1, 4)
    return {"dropped": dropped, "why_dropped": [s.status for s in gone]}


def _oldest(sample: DumpedSample) -> float:
    versions = [number_of(version) for version in sample.weight_versions]
    return float(min(versions)) if versions and None not in versions else math.nan


def _join(rows: list[DumpedSample], about: list[DumpedSample], notes: Notes) -> dict[str, int]:
    """Adds the data of the rollout dump to the rows. Returns ``retold``, ``paired`` and ``foreign``.

    Samples are matched by position, or by sample index in files without positions. The three numbers are
    those of ``DumpedRollout``.
    """
    by_index = {sample.index: sample.position for sample in about if sample.index is not None}
    retold, foreign = [], []
    for row in rows:
        if row.position < 0:  # of a per-rank file: -1 - sample index
            row.position = by_index.get(-1 - row.position, -1 - row.position)
        if row.position >= len(about):
            continue
        sample = about[row.position]
        foreign += _begins_otherwise(row.behavior, sample.behavior)
        compare_heads(row, sample)
        if sample.response_length == row.response_length:
            _take_over(row, sample)
            retold.append(_is_retold(row, sample))
        else:
            lengths = f", rollout {sample.response_length}, train {row.response_length} tokens"
            notes.add(
                "with different lengths in the two dumps, whose rollout data was ignored",
                row.position,
                lengths,
            )
    return {"retold": sum(retold), "paired": len(foreign), "foreign": sum(foreign)}


def _begins_otherwise(of_train: Any, of_rollout: Any) -> list[bool]:
    """Returns whether the first log-probs of the sampler differ between both dumps of a sample.

    The train dump should hold a copy of the rollout dump's. The list is empty if there is nothing to compare.
    """
    if of_train is None or of_rollout is None:
        return []
    try:
        both = (as_array(values[:BEGIN], torch.float32).tolist() for values in (of_train, of_rollout))
        differences = [abs(a - b) for a, b in zip(*both, strict=False)]
    except MALFORMED:  # missing, or not numbers, which is reported elsewhere
        return []
    return [any(difference > COPIED for difference in differences)] if differences else []


def _is_retold(row: DumpedSample, sample: DumpedSample) -> bool:
    """Returns whether the two dumps hold different tokens of prompt or response."""
    if row.ids is None or sample.ids is None:
        return False
    with suppress(*NO_NUMBERS):  # reported elsewhere
        return not numpy.array_equal(as_array(row.ids, torch.int64), as_array(sample.ids, torch.int64))
    return False


def _take_over(row: DumpedSample, sample: DumpedSample) -> None:
    """Gives a sample of the train dump the fields of the rollout dump, as ``Field.dumps`` orders them."""
    ours, theirs = row.__dict__, sample.__dict__
    for one in ROLLOUT_ALONE:
        ours[one] = theirs[one]
    for one in ROLLOUT_FIRST:
        ours[one] = ours[one] if theirs[one] in ABSENT else theirs[one]
    for one in TRAIN_FIRST:
        ours[one] = theirs[one] if ours[one] is None else ours[one]
    row.weight_versions = sample.weight_versions


def rows_of_rollout(samples: Sequence[Mapping[str, Any]]) -> list[DumpedSample]:
    """Returns the samples of a rollout dump, without what the train dump holds.

    Lists of numbers become arrays, which need a tenth of the memory.
    """
    rows = samples_of(columns_of(samples, range(len(samples)), ROLLOUT))
    for row in rows:
        row.token_versions = ()
        row.behavior = None if row.behavior is None else as_array(row.behavior, torch.float32)
        with suppress(*NO_NUMBERS):
            row.ids = as_array(row.ids, torch.int64)
    return rows


def rows_of_train(samples: Sequence[Mapping[str, Any]], content: Mapping[str, Any]) -> list[DumpedSample]:
    """Returns the samples of a train dump, with log-probs of the whole response."""
    shards = content.get("dp_shards") or ()
    steps, places = step_of_position(shards), place_of_position(shards)
    nowhere = None, None
    named = (sample.get("rollout_position") for sample in samples)
    rows = samples_of(columns_of(samples, [i if at is None else int(at) for i, at in enumerate(named)]))
    for row in rows:
        row.step = steps.get(row.position)
        row.batch, row.place = places.get(row.position, nowhere)
    return rows


def place_of_position(shards: Sequence[Mapping[str, Any]]) -> dict[int, tuple[int, int]]:
    """Returns rollout position -> number of its micro-batch, and how many samples come before it there."""
    places, number = {}, 0
    for shard in shards:
        partition, batches = shard.get("partition"), shard.get("micro_batch_indices")
        for batch in batches or () if partition is not None else ():
            places.update({int(partition[i]): (number, place) for place, i in enumerate(batch)})
            number += 1
    return places


def step_of_position(shards: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Returns rollout position -> the optimizer step that trained it, counted from 0."""
    step_of = {}
    for shard in shards:
        partition, batches, counts = map(shard.get, ("partition", "micro_batch_indices", "num_microbatches"))
        if partition is not None and batches is not None and counts is not None:
            steps_of_batches = (step for step, count in enumerate(counts) for _ in range(int(count)))
            for step, batch in zip(steps_of_batches, batches, strict=False):
                step_of.update({int(partition[i]): step for i in batch})
    return step_of
