"""Per-rank train dumps of slime v0.3.1 and older -> whole responses.

Every rank wrote a file: tensor-parallel ranks the same one, context-parallel ranks their zig-zag part of each
response, pipeline stages before the last one without log-probs. No file says what its rank was; the lengths
do. Source: slime/utils/train_dump_utils.py and actor.py at v0.3.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slime_ext.errors import DataError
from slime_ext.host.packing import zigzag
from slime_ext.tools.analysis.readers.samples import DumpedSample, as_tensor, sample_of

Data = Mapping[str, Any]
# Local slices; masks and tokens are whole.
CUT = ("log_probs", "rollout_log_probs", "advantages", "entropy", "ref_log_probs")


def merge_ranks(ranks: Sequence[tuple[int, Data]]) -> list[DumpedSample]:
    """The samples of a rollout, put together from the files of its ranks.

    Raises:
        DataError: a context-parallel part is missing, or the lengths fit no zig-zag layout.
    """
    last_stage = [data for _, data in sorted(ranks, key=lambda r: r[0]) if data.get("log_probs")]
    if ranks and not last_stage:
        raise DataError(
            f"expected log_probs in one of {len(ranks)} per-rank files, got none: slime v0.3.0 and v0.3.1 "
            "write them only if they are recomputed (--get-mismatch-metrics), and only on the last pipeline "
            "stage"
        )
    shards: dict[tuple, list[Data]] = {}
    for data in last_stage:
        shards.setdefault(_identity(data), []).append(data)
    return [row for parts in shards.values() for row in _whole(parts)]


def _identity(data: Data) -> tuple:
    """A value that is equal for ranks that hold the same samples."""
    indices = data.get("sample_indices")
    if indices is not None and None not in indices:
        return tuple(map(int, indices))
    return tuple(tuple(as_tensor(tokens, torch.int64).tolist()) for tokens in data["tokens"])


def _whole(parts: list[Data]) -> list[DumpedSample]:
    lengths = [
        (len(t), int(n)) for t, n in zip(parts[0]["tokens"], parts[0]["response_lengths"], strict=True)
    ]
    size = _context_parallel_size(parts, lengths)
    columns = parts[
        :: len(parts) // size
    ]  # tensor-parallel ranks are neighbours, and their files are the same
    keys = [
        key
        for key, values in columns[0].items()
        if hasattr(values, "__len__") and len(values) == len(lengths)
    ]
    rows = []
    for i, both in enumerate(lengths):
        sample = {key: columns[0][key][i] for key in keys}
        for key in CUT:
            if sample.get(key) is not None:
                sample[key] = join_response([as_tensor(c[key][i], torch.float32) for c in columns], *both)
        index = sample.get("sample_indices")
        rows.append(sample_of(sample, i if index is None else -1 - int(index)))
    return rows


def _context_parallel_size(parts: list[Data], lengths: list[tuple[int, int]]) -> int:
    """The context-parallel size for which every file has the lengths that its rank would have. Copies of a
    rank follow each other."""
    held = [[len(x) for x in data["log_probs"]] for data in parts]
    for size in range(1, len(parts) + 1):
        copies = len(parts) // size
        wanted = [
            [_held(*both, rank, size) for both in lengths] for rank in range(size) for _ in range(copies)
        ]
        if held == wanted:
            return size
    raise DataError(
        f"expected {sum(r for _, r in lengths)} log-probs from {len(parts)} ranks, got {[*map(sum, held)]}: "
        "no context-parallel layout explains these lengths; is the file of a rank missing?"
    )


def _held(total: int, response: int, rank: int, size: int) -> int:
    return response if size == 1 else sum(b - a for a, b in zigzag(total, response, rank, size))


def join_response(parts: Sequence[torch.Tensor], total_length: int, response_length: int) -> torch.Tensor:
    """The parts [L_r] of all context-parallel ranks, in their order -> the full response [R]."""
    if len(parts) == 1:
        return parts[0]
    out = torch.full((response_length,), torch.nan, dtype=parts[0].dtype)
    for rank, part in enumerate(parts):
        (a, b), (c, d) = zigzag(total_length, response_length, rank, len(parts))
        out[a:b], out[c:d] = part[: b - a], part[b - a :]
    return out
