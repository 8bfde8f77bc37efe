"""slime's dumps: the files of a rollout, joined by the position of each sample in it.

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

import torch

from slime_ext.errors import DataError, cut
from slime_ext.host.contract import number_of
from slime_ext.tools.analysis.document import Skipped
from slime_ext.tools.analysis.readers.archive import read_archive
from slime_ext.tools.analysis.readers.find import ARCHIVE, Job
from slime_ext.tools.analysis.readers.ranks import merge_ranks
from slime_ext.tools.analysis.readers.routes import compared_routes, odd_routes
from slime_ext.tools.analysis.readers.samples import (
    NO_NUMBERS,
    DumpedSample,
    Notes,
    as_tensor,
    assemble,
    rollout_number,
    sample_of,
    whole_number,
)
from slime_ext.tools.analysis.readers.spilled import with_tensors
from slime_ext.tools.analysis.readers.topk import compare_heads
from slime_ext.tools.analysis.readers.unpickle import load_plain
from slime_ext.tools.analysis.records import DumpedRollout

FORMAT_VERSION = 2
# Raised by files with slime's keys and other values.
MALFORMED = (KeyError, AttributeError, IndexError, *NO_NUMBERS)
BEGIN, COPIED = 4, 1e-3  # log-probs of a sample that are compared between its dumps; nats
ROLLOUT, TRAIN, RANK = "rollout", "train", "rank"


def kind_of(found: Mapping[str, Any]) -> str:
    """What a file is: ``rollout``, ``train`` (format version 2) or ``rank`` (v0.3.1 and older).

    Raises:
        DataError: it is neither.
    """
    if "rollout_data" in found:
        return RANK
    if "format_version" in found:
        if found["format_version"] != FORMAT_VERSION:
            raise DataError(
                f"expected format version {FORMAT_VERSION}, got {cut(found['format_version'])}: this "
                "reads that version and the per-rank files of slime v0.3.1 and older"
            )
        return TRAIN
    if "samples" not in found:
        raise DataError("expected the key samples or rollout_data, got neither: not a dump of slime")
    return ROLLOUT


@dataclass
class _Content:
    """What the files of a rollout hold, by their kind."""

    rollout_id: int
    paths: list[Path] = field(default_factory=list)
    rows: dict[str, list[DumpedSample]] = field(default_factory=dict)
    ranks: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    notes: Notes = field(default_factory=Notes)

    def take(self, kind: str, found: Mapping[str, Any], path: Path) -> None:
        """Adds the content of a file.

        Raises:
            DataError: it is a second one of its kind.
        """
        if kind in self.rows:
            raise DataError(
                f"expected one {kind} dump of rollout {self.rollout_id}, got a second: left out; analyse "
                "another run's by itself"
            )
        if kind == RANK:
            self.ranks.append((int(found.get("rank", len(self.ranks))), found["rollout_data"]))
            return
        samples = [self._with_tensors(sample, i, path) for i, sample in enumerate(found["samples"])]
        self.rows[kind] = rows_of_rollout(samples) if kind == ROLLOUT else rows_of_train(samples, found)

    def _with_tensors(self, sample: Mapping[str, Any], i: int, path: Path) -> Mapping[str, Any]:
        def failed(name: str, why: str) -> None:
            position = whole_number(sample.get("rollout_position"))
            self.notes.lack(name, i if position is None else position, why)

        return with_tensors(sample, path, failed)

    def rollout(self) -> DumpedRollout | Skipped:
        """The rollout that the files make up."""
        source = str(Job(tuple(self.paths), self.rollout_id, 0))
        try:
            rows = self.rows.get(TRAIN) or merge_ranks(self.ranks)
        except DataError as error:
            return Skipped(source, str(error))
        except MALFORMED as error:
            return Skipped(source, _of_another_kind(error))
        about, notes = self.rows.get(ROLLOUT, []), self.notes
        of_all: dict[str, Any] = dict(_join(rows, about, notes))
        if rows:
            of_all |= _dropped(rows, about)
            pairs = [(r, about[r.position]) for r in rows if r.position < len(about)]
            of_all |= {"routing": odd_routes(pairs), **compared_routes(pairs)}
        return assemble(self.rollout_id, source, rows or about, notes, **of_all)


def read_job(job: Job) -> list[DumpedRollout | Skipped]:
    """What had to be skipped, then the rollouts of a job's files: several if their names do not differ."""
    skipped: list[DumpedRollout | Skipped] = []
    contents: dict[int, _Content] = {}
    for path in job.paths:
        try:
            _add(contents, path, job.rollout_id or 0)
        except DataError as error:
            skipped.append(Skipped(str(path), str(error)))
    found = [c for c in contents.values() if c.rows.get(TRAIN) or c.ranks or (c.paths and not skipped)]
    return skipped + [content.rollout() for content in found]


def _add(contents: dict[int, _Content], path: Path, number: int) -> None:
    """Reads a file and adds it to its rollout.

    Raises:
        DataError: it is no dump, or a second one of the same rollout.
    """
    found = read_archive(path) if path.name.endswith(ARCHIVE) else load_plain(path)
    kind = kind_of(found)
    try:
        rollout_id = rollout_number(found.get("rollout_id", number))
        content = contents.setdefault(rollout_id, _Content(rollout_id))
        content.take(kind, found, path)
    except DataError:
        raise
    except MALFORMED as error:
        raise DataError(_of_another_kind(error)) from None
    content.paths.append(path)


def _of_another_kind(error: Exception) -> str:
    return f"holds values of another kind than slime's ({type(error).__name__}: {cut(error)})"


def _dropped(rows: Sequence[DumpedSample], about: Sequence[DumpedSample]) -> dict[str, Any]:
    """``dropped`` and ``why_dropped`` of ``DumpedRollout``: samples of the rollout dump that no row trains
    on."""
    there = {row.position for row in rows}
    gone = [s for s in about if s.position not in there and s.reward is not None]
    numbers = [(s.response_length, s.reward, s.position, _oldest(s)) for s in gone]
    dropped = torch.tensor(numbers, dtype=torch.float64).reshape(-1, 4)
    return {"dropped": dropped, "why_dropped": [s.status for s in gone]}


def _oldest(sample: DumpedSample) -> float:
    found = [number_of(version) for version in sample.weight_versions]
    return float(min(found)) if found and None not in found else math.nan


def _join(rows: list[DumpedSample], about: list[DumpedSample], notes: Notes) -> dict[str, int]:
    """Adds text, versions, group and reward of the rollout dump to the rows, by position, or by sample
    index for files without positions; returns ``retold``, ``paired`` and ``foreign`` of ``DumpedRollout``."""
    by_index = {sample.index: sample.position for sample in about if sample.index is not None}
    retold, foreign = [], []
    for row in rows:
        if row.position < 0:  # a per-rank file: minus one, minus the sample's index
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
            notes.add("with different lengths in the two dumps: their rollout data was ignored", row, lengths)
    return {"retold": sum(retold), "paired": len(foreign), "foreign": sum(foreign)}


def _begins_otherwise(mine: Any, theirs: Any) -> list[bool]:
    """Whether two lists of the sampler's log-probs of one sample begin with other numbers: the train dump has
    a copy of the rollout dump's. Empty where there is nothing to compare."""
    if mine is None or theirs is None:
        return []
    try:
        both = (as_tensor(values[:BEGIN], torch.float32).tolist() for values in (mine, theirs))
        differences = [abs(a - b) for a, b in zip(*both, strict=False)]
    except MALFORMED:  # none, or no numbers: said elsewhere
        return []
    return [any(difference > COPIED for difference in differences)] if differences else []


def _is_retold(row: DumpedSample, sample: DumpedSample) -> bool:
    """Whether the two dumps hold other tokens of prompt or response."""
    if row.ids is None or sample.ids is None:
        return False
    with suppress(*NO_NUMBERS):  # said elsewhere
        return not torch.equal(as_tensor(row.ids, torch.int64), as_tensor(sample.ids, torch.int64))
    return False


def _take_over(row: DumpedSample, sample: DumpedSample) -> None:
    for name in ("prompt", "response", "weight_versions", "group", "cached"):
        setattr(row, name, getattr(sample, name))
    row.engine, row.status = sample.engine or row.engine, sample.status or row.status
    row.reward = row.reward if sample.reward is None else sample.reward
    row.behavior = sample.behavior if row.behavior is None else row.behavior
    row.kept = sample.kept if row.kept is None else row.kept


def rows_of_rollout(samples: Sequence[Mapping[str, Any]]) -> list[DumpedSample]:
    """The samples of a rollout dump, without what the train dump holds; lists of numbers as tensors, which
    take a tenth of their memory."""
    rows = [sample_of(sample, i) for i, sample in enumerate(samples)]
    for row in rows:
        row.proximal = row.mask = row.tokens = row.advantages = row.entropy = row.reference = None
        row.token_versions = ()
        row.behavior = None if row.behavior is None else as_tensor(row.behavior, torch.float32)
        with suppress(*NO_NUMBERS):
            row.ids = as_tensor(row.ids, torch.int64)
    return rows


def rows_of_train(samples: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> list[DumpedSample]:
    """The samples of a train dump; log-probs are over the whole response."""
    shards = found.get("dp_shards") or ()
    steps, places = step_of_position(shards), place_of_position(shards)
    rows = []
    for i, sample in enumerate(samples):
        position = sample.get("rollout_position")
        position = i if position is None else int(position)
        rows.append(sample_of(sample, position, steps.get(position)))
        rows[-1].place = places.get(position)
    return rows


def place_of_position(shards: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Rollout position -> how many samples come before it in its micro-batch."""
    found = {}
    for shard in shards:
        partition, batches = shard.get("partition"), shard.get("micro_batch_indices")
        for batch in batches or () if partition is not None else ():
            found.update({int(partition[i]): place for place, i in enumerate(batch)})
    return found


def step_of_position(shards: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Rollout position -> the optimizer step, from 0, that trained it."""
    found = {}
    for shard in shards:
        partition, batches, counts = map(shard.get, ("partition", "micro_batch_indices", "num_microbatches"))
        if partition is not None and batches is not None and counts is not None:
            steps = (step for step, count in enumerate(counts) for _ in range(int(count)))
            for step, batch in zip(steps, batches, strict=False):
                found.update({int(partition[i]): step for i in batch})
    return found
