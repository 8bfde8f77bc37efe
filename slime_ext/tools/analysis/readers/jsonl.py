"""Reads JSONL: one sample per line, with log-probs as plain lists.

Keys of a line (lists have one entry per response token; null is a missing log-prob):

    rollout_log_probs  (or behavior)                    required: log-probs of the policy that sampled
    log_probs          (or train_log_probs, proximal)   required: log-probs of the trainer before its step
    loss_mask (or mask), tokens (response, or prompt + response), advantages (a list, or one number),
    entropy, ref_log_probs, token_weight_versions       lists, optional
    rollout_topk_log_probs, topk_log_probs              lists of K each, optional: see ``readers/topk.py``
    rollout_top_p_log_probs, top_p_log_probs            flat lists over all tokens' supports, optional
    rollout_top_p_token_offsets                         where each token's support begins, and the end
    rollout_id (0), prompt_length, reward, group_index, weight_versions, prompt, response   optional
    engine (or another of ENGINES in ``fields.py``), status, data_parallel_rank             optional
    prefix_cache_info (a mapping with cached_tokens)    optional

Lines of one rollout must be adjacent. If a rollout number appears again later in the file, those lines are
read as a separate rollout and reported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from slime_ext.tools.analysis.document import Skipped
from slime_ext.tools.analysis.readers.samples import (
    BOTH_SIDES,
    Columns,
    Notes,
    assemble,
    columns_of,
    rollout_number,
    samples_of,
    taken_from,
)
from slime_ext.tools.analysis.readers.topk import HEADS, compare_heads
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.values import first

NAMED = 2  # bad lines that are reported one by one
MALFORMED = (TypeError, ValueError, OverflowError, RecursionError)
LARGE = 4 << 20  # bytes of a file from which on a faster parser saves more time than its import takes


# A line that holds a sample: number of its rollout, its number in the file counted from 1, and the sample.
Line = tuple[int, int, dict[str, Any]]


def read_jsonl(path: Path) -> Iterator[DumpedRollout | Skipped]:
    """Yields the rollouts of a file in order, then the lines that are not samples as ``Skipped``."""
    bad: dict[float, Skipped] = {}  # by the number of the line
    seen: set[int] = set()
    for rollout_id, lines in groupby(_lines(path, bad), key=itemgetter(0)):
        columns = _columns(path, list(lines), bad)
        if columns["position"]:
            yield assemble(rollout_id, str(path), columns, Notes(), is_repeated=rollout_id in seen)
            seen.add(rollout_id)
    skipped = [bad[at] for at in sorted(bad)]
    yield from skipped[:NAMED]
    if len(skipped) > NAMED:
        more = f"{len(skipped) - NAMED} more lines are not samples, from this one on"
        yield Skipped(skipped[NAMED].path, more)


def _lines(path: Path, bad: dict[float, Skipped]) -> Iterator[Line]:
    try:
        parse = _parser(path)
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            for at, line in enumerate(file, 1):
                try:
                    if not line.isspace():
                        yield _line(at, parse(line))
                except MALFORMED as error:
                    bad[at] = Skipped(f"{path}:{at}", str(error))
    except OSError as error:
        bad[math.inf] = Skipped(str(path), f"cannot be read: {error.strerror or error}")


def _parser(path: Path) -> Callable[[str], Any]:
    """Returns what parses a line: ``json.loads``, or for large files a parser that takes a third of its time.

    Both give the same values. The fast parser has other messages, and refuses deep nesting and half surrogate
    pairs, so ``json.loads`` reads each line that it refuses.
    """
    if path.stat().st_size < LARGE:
        return json.loads
    from pydantic_core import from_json

    def parse(line: str) -> Any:
        try:
            return from_json(line)
        except ValueError:
            return json.loads(line)

    return parse


def _line(at: int, sample: Any) -> Line:
    if not isinstance(sample, dict):
        raise ValueError(f"expected a JSON object, got {type(sample).__name__}")
    if type(first(sample, *BOTH_SIDES)) is not list:
        columns = _read([sample])  # raises if another value is the reason
        if columns.get("behavior") in (None, [None]) and columns.get("proximal") in (None, [None]):
            raise ValueError("has neither rollout_log_probs nor log_probs, so it is not a sample")
    return rollout_number(sample.get("rollout_id") or 0), at, sample


def _columns(path: Path, lines: Sequence[Line], bad: dict[float, Skipped]) -> Columns:
    """Returns the values of the samples of a rollout, without those that cannot be read."""
    try:
        return _read([sample for _, _, sample in lines])
    except MALFORMED:  # looks for the lines
        sound = []
        for _, at, sample in lines:
            try:
                _read([sample])
                sound.append(sample)
            except MALFORMED as error:
                bad[at] = Skipped(f"{path}:{at}", str(error))
        return _read(sound)


def _read(samples: Sequence[dict[str, Any]]) -> Columns:
    columns = columns_of(samples, range(len(samples)))
    if columns.keys().isdisjoint(HEADS):
        return columns
    rows = samples_of(columns)
    for row in rows:
        compare_heads(row, row)
    return taken_from(rows)
