"""slime's dumps: which of a rollout's files holds what, joined by the position in the rollout.

Nothing but plain data is ever unpickled: a dump is somebody's pickle, and unpickling another object may run
code. Formats: slime/observability/{rollout_data_utils,train_data_utils}.py at 624b824, and
slime/utils/train_dump_utils.py up to v0.3.1.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from slime_ext.errors import DataError, cut
from slime_ext.host.contract import number_of, versions_of
from slime_ext.tools.analysis.document import Skipped
from slime_ext.tools.analysis.readers.find import Job
from slime_ext.tools.analysis.readers.ranks import merge_ranks
from slime_ext.tools.analysis.readers.routes import compared_routes
from slime_ext.tools.analysis.readers.samples import (
    NO_NUMBERS,
    DumpedSample,
    Notes,
    as_tensor,
    assemble,
    checksums,
    kept_sizes,
    number,
    rollout_number,
    sample_of,
    text,
)
from slime_ext.tools.analysis.readers.unpickle import load_plain
from slime_ext.tools.analysis.records import DumpedRollout

FORMAT_VERSION = 2
# What a file of slime's keys with other values than slime's leads to.
MALFORMED = (KeyError, AttributeError, IndexError, *NO_NUMBERS)
NOTHING = pickle.dumps([])
BEGIN, COPIED = 4, 1e-3  # log-probs of a sample that are compared between its dumps; nats


def kind_of(found: Mapping[str, Any]) -> str:
    """What a file is: ``rollout``, ``train`` (format version 2) or ``rank`` (v0.3.1 and older).

    Raises:
        DataError: it is neither.
    """
    if "rollout_data" in found:
        return "rank"
    if "format_version" in found:
        if found["format_version"] != FORMAT_VERSION:
            raise DataError(
                f"expected format version {FORMAT_VERSION}, got {_short(found['format_version'])}: this "
                "reads that version and the per-rank files of slime v0.3.1 and older"
            )
        return "train"
    if "samples" not in found:
        raise DataError("expected the key samples or rollout_data, got neither: not a dump of slime")
    return "rollout"


def _short(value: Any) -> str:
    """A value of a file in a message; of lists, which may hold themselves, the kind alone."""
    return cut(value) if isinstance(value, (str, int, float)) else type(value).__name__


@dataclass
class _Content:
    """What was read so far of the files of one rollout."""

    rollout_id: int
    paths: list[Path] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    # Of the rollout dump. As bytes: one small object that stays would keep the memory of all around it.
    about: bytes = NOTHING
    rows: list[DumpedSample] = field(default_factory=list)
    ranks: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)

    def take(self, kind: str, found: Mapping[str, Any]) -> None:
        """Adds the content of a file."""
        if kind == "rollout":
            self.about = pickle.dumps(rows_of_rollout(found["samples"]))
        elif kind == "train":
            self.rows = rows_of_train(found)
        else:
            self.ranks.append((int(found.get("rank", len(self.ranks))), found["rollout_data"]))

    def rollout(self, source: str) -> DumpedRollout | Skipped:
        """The rollout that the files make up."""
        try:
            rows = self.rows or merge_ranks(self.ranks)
        except DataError as error:
            return Skipped(source, str(error))
        except MALFORMED as error:
            return Skipped(source, _of_another_kind(error))
        about = pickle.loads(self.about)  # our own
        notes = Notes()
        whole: dict[str, Any] = dict(_join(rows, about, notes))
        if rows:
            whole |= _dropped(rows, about)
            whole |= compared_routes(
                [(row, about[row.position]) for row in rows if row.position < len(about)]
            )
        return assemble(self.rollout_id, source, rows or about, notes, **whole)


def read_job(job: Job) -> Iterator[DumpedRollout | Skipped]:
    """The rollouts of a job's files (more than one if their names did not tell them apart), after what had
    to be skipped."""
    yield from _read(job)  # in a call of its own: what the files held is gone when a rollout is shown


def _read(job: Job) -> list[DumpedRollout | Skipped]:
    skipped: list[DumpedRollout | Skipped] = []
    contents: dict[int, _Content] = {}
    for path in job.paths:
        try:
            _add(contents, path, job.rollout_id or 0)
        except DataError as error:
            skipped.append(Skipped(str(path), str(error)))
    found = [c for c in contents.values() if c.rows or c.ranks or not skipped]  # or it has been named
    return skipped + [c.rollout(str(Job(tuple(c.paths), c.rollout_id, 0))) for c in found]


def _add(contents: dict[int, _Content], path: Path, number: int) -> None:
    """Reads a file and adds it to its rollout.

    Raises:
        DataError: it is no dump, or a second one of the same rollout.
    """
    found = load_plain(path)
    kind = kind_of(found)
    try:
        rollout_id = rollout_number(found.get("rollout_id", number))
        content = contents.setdefault(rollout_id, _Content(rollout_id))
        is_second = kind != "rank" and kind in content.kinds
        if not is_second:
            content.take(kind, found)
    except MALFORMED as error:
        raise DataError(_of_another_kind(error)) from None
    if is_second:
        raise DataError(
            f"expected one {kind} dump of rollout {rollout_id}, got a second: left out; analyse another "
            "run's by itself"
        )
    content.paths.append(path)
    content.kinds.append(kind)


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
    """The oldest version of the weights that sampled a sample; NaN where unknown."""
    found = [number_of(version) for version in sample.weight_versions]
    return float(min(found)) if found and None not in found else math.nan


def _join(rows: list[DumpedSample], about: list[DumpedSample], notes: Notes) -> dict[str, int]:
    """Adds text, versions, group and reward of the rollout dump to the rows, by position, or by sample
    index for files without positions; returns ``retold``, ``paired`` and ``foreign`` of ``DumpedRollout``."""
    found = {"retold": 0, "paired": 0, "foreign": 0}
    by_index = {sample.index: sample.position for sample in about if sample.index is not None}
    for row in rows:
        if row.position < 0:  # a per-rank file: minus one, minus the sample's index
            row.position = by_index.get(-1 - row.position, -1 - row.position)
        if row.position >= len(about):
            continue
        sample = about[row.position]
        is_foreign = _begins_otherwise(row.behavior, sample.behavior)
        if is_foreign is not None:
            found["paired"] += 1
            found["foreign"] += is_foreign
        if sample.response_length == row.response_length:
            _take_over(row, sample)
            is_known = None not in (row.token_sum, sample.token_sum)
            found["retold"] += is_known and row.token_sum != sample.token_sum
        else:
            notes.add(
                "differ in length between the two dumps; their rollout data was ignored",
                row,
                f", rollout dump {sample.response_length}, train dump {row.response_length}",
            )
    return found


def _begins_otherwise(mine: Any, theirs: Any) -> bool | None:
    """Whether two lists of the sampler's log-probs of one sample begin with other numbers: the train dump has
    a copy of the rollout dump's. None where there is nothing to compare."""
    try:
        both = (as_tensor(values[:BEGIN], torch.float64).tolist() for values in (mine, theirs))
        differences = [abs(a - b) for a, b in zip(*both, strict=False)]
        return any(difference > COPIED for difference in differences) if differences else None
    except MALFORMED:  # none, or no numbers: said elsewhere
        return None


def _take_over(row: DumpedSample, sample: DumpedSample) -> None:
    for name in ("prompt", "response", "weight_versions", "group"):
        setattr(row, name, getattr(sample, name))
    row.reward = row.reward if sample.reward is None else sample.reward
    row.behavior = sample.behavior if row.behavior is None else row.behavior
    row.kept = sample.kept if row.kept is None else row.kept


def rows_of_rollout(samples: Sequence[Mapping[str, Any]]) -> list[DumpedSample]:
    """The samples of a rollout dump, without their lists of tokens, their numbers in arrays, which are
    pickled faster than tensors. A text that many samples share is made once."""
    made: dict[int, str] = {}
    sums = checksums([sample.get("tokens") for sample in samples])

    def text_of(value: Any) -> str:
        return made[id(value)] if id(value) in made else made.setdefault(id(value), text(value))

    def row_of(position: int, sample: Mapping[str, Any]) -> DumpedSample:
        length, behavior = int(sample.get("response_length") or 0), sample.get("rollout_log_probs")
        return DumpedSample(
            position=position,
            response_length=length,
            behavior=None if behavior is None else as_tensor(behavior, torch.float32).numpy(),
            kept=kept_sizes(sample, length, sample.get("tokens")),
            routed=sample.get("rollout_routed_experts"),
            token_sum=sums[position],
            index=_whole(sample.get("index")),
            group=_whole(sample.get("group_index")),
            status=cut(text(sample.get("status"))),
            reward=number(sample.get("reward")),
            prompt=text_of(sample.get("prompt")),
            response=text_of(sample.get("response")),
            weight_versions=versions_of(sample.get("weight_versions")),
        )

    return [row_of(i, sample) for i, sample in enumerate(samples)]


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, Integral) else None


def rows_of_train(found: Mapping[str, Any]) -> list[DumpedSample]:
    """The samples of a train dump; log-probs are over the whole response."""
    steps = step_of_position(found.get("dp_shards") or ())
    rows = []
    for i, sample in enumerate(found["samples"]):
        position = sample.get("rollout_position")
        position = i if position is None else int(position)
        rows.append(sample_of(sample, position, steps.get(position)))
    for row, own in zip(rows, checksums([sample.get("tokens") for sample in found["samples"]]), strict=True):
        row.token_sum = own
    return rows


def step_of_position(shards: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Rollout position -> the optimizer step, from 0, that trained it."""
    found = {}
    for shard in shards:
        partition, batches = shard.get("partition"), shard.get("micro_batch_indices")
        counts = shard.get("num_microbatches")
        if partition is None or batches is None or counts is None:
            continue
        # one by one: a count in a file may be of any size
        steps = (step for step, count in enumerate(counts) for _ in range(int(count)))
        for step, batch in zip(steps, batches, strict=False):
            found.update({int(partition[i]): step for i in batch})
    return found
