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
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from slime_ext.tools.analysis.document import Skipped
from slime_ext.tools.analysis.readers.samples import DumpedSample, Notes, assemble, rollout_number, sample_of
from slime_ext.tools.analysis.readers.topk import compare_heads
from slime_ext.tools.analysis.records import DumpedRollout

NAMED = 2  # bad lines that are reported one by one
MALFORMED = (TypeError, ValueError, OverflowError, RecursionError)


def read_jsonl(path: Path) -> Iterator[DumpedRollout | Skipped]:
    """Yields the rollouts of a file in order, then the lines that are not samples as ``Skipped``."""
    bad: list[Skipped] = []
    seen: set[int] = set()
    for rollout_id, lines in groupby(_good(path, bad), key=itemgetter(0)):
        rows = [row for _, row in lines]
        for position, row in enumerate(rows):
            row.position = position
        yield assemble(rollout_id, str(path), rows, Notes(), is_repeated=rollout_id in seen)
        seen.add(rollout_id)
    yield from bad[:NAMED]
    if len(bad) > NAMED:
        yield Skipped(bad[NAMED].path, f"{len(bad) - NAMED} more lines are not samples, from this one on")


def _good(path: Path, bad: list[Skipped]) -> Iterator[tuple[int, DumpedSample]]:
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            for at, line in enumerate(file, 1):
                try:
                    if line.strip():
                        yield _sample(line)
                except MALFORMED as error:
                    bad.append(Skipped(f"{path}:{at}", str(error)))
    except OSError as error:
        bad.append(Skipped(str(path), f"cannot be read: {error.strerror or error}"))


def _sample(line: str) -> tuple[int, DumpedSample]:
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError(f"expected a JSON object, got {type(fields).__name__}")
    row = sample_of(fields, 0)
    compare_heads(row, row)
    if row.behavior is None and row.proximal is None:
        raise ValueError("has neither rollout_log_probs nor log_probs, so it is not a sample")
    return rollout_number(fields.get("rollout_id") or 0), row
