"""Merges the per-rank train dumps of slime v0.3.1 and older into whole responses.

Each rank wrote a file. Tensor-parallel ranks wrote the same file, context-parallel ranks their zig-zag part
of each response, and all pipeline stages but the last a file without log-probs. No file names its rank, but
the lengths determine it. Source: slime/utils/train_dump_utils.py and actor.py at v0.3.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slime_ext.errors import DataError
from slime_ext.hosts.slices import zigzag
from slime_ext.tools.analysis.readers.samples import DumpedSample, columns_of, samples_of
from slime_ext.tools.analysis.values import as_tensor

Data = Mapping[str, Any]
# Fields that hold only a rank's slice. Masks and tokens are whole.
CUT = ("log_probs", "rollout_log_probs", "advantages", "entropy", "ref_log_probs")


def merge_ranks(ranks: Sequence[tuple[int, Data]]) -> list[DumpedSample]:
    """Returns the samples of a rollout, merged from the files of its ranks.

    Raises:
        DataError: a context-parallel part is missing, or the lengths fit no zig-zag layout.
    """
    last_stage = [data for _, data in sorted(ranks, key=lambda r: r[0]) if data.get("log_probs")]
    if ranks and not last_stage:
        raise DataError(
            f"expected log_probs in one of {len(ranks)} per-rank files, got none: add the file of the last "
            "pipeline stage, and train with --get-mismatch-metrics, because slime v0.3.0 and v0.3.1 write "
            "only recomputed log-probs"
        )
    shards: dict[tuple, list[Data]] = {}
    for data in last_stage:
        shards.setdefault(_identity(data), []).append(data)
    return [row for parts in shards.values() for row in _whole(parts)]


def _identity(data: Data) -> tuple:
    """Returns a value that is equal for ranks with the same samples."""
    indices = data.get("sample_indices")
    if indices is not None and None not in indices:
        return tuple(map(int, indices))
    return tuple(tuple(as_tensor(tokens, torch.int64).tolist()) for tokens in data["tokens"])


def _whole(parts: list[Data]) -> list[DumpedSample]:
    """Returns the samples that several ranks hold, each with its whole response.

    Raises:
        DataError: the lengths fit no zig-zag layout.
    """
    lengths = [
        (len(t), int(n)) for t, n in zip(parts[0]["tokens"], parts[0]["response_lengths"], strict=True)
    ]
    # The context-parallel size is the one that explains the lengths in every file. The files of
    # tensor-parallel ranks are equal and follow each other.
    in_files = [[len(values) for values in data["log_probs"]] for data in parts]
    by_rank = [[response for _, response in lengths]]
    for size in range(1, len(parts) + 1):
        if size > 1:
            by_rank = [
                [sum(stop - start for start, stop in zigzag(*both, rank, size)) for both in lengths]
                for rank in range(size)
            ]
        if in_files == [row for row in by_rank for _ in range(len(parts) // size)]:
            break
    else:
        raise DataError(
            f"expected {sum(r for _, r in lengths)} log-probs from {len(parts)} ranks, got "
            f"{[*map(sum, in_files)]}: no context-parallel layout explains these lengths; is the file of a "
            "rank missing?"
        )
    columns = parts[:: len(parts) // size]  # one file of each context-parallel rank
    keys = [
        key
        for key, values in columns[0].items()
        if hasattr(values, "__len__") and len(values) == len(lengths)
    ]
    samples, positions = [], []
    for i, both in enumerate(lengths):
        sample = {key: columns[0][key][i] for key in keys}
        for key in CUT:
            if sample.get(key) is not None:
                sample[key] = join_response([as_tensor(c[key][i], torch.float32) for c in columns], *both)
        index = sample.get("sample_indices")
        samples.append(sample)
        positions.append(i if index is None else -1 - int(index))
    return samples_of(columns_of(samples, positions))


def join_response(parts: Sequence[torch.Tensor], total_length: int, response_length: int) -> torch.Tensor:
    """Returns the full response [R] from the parts [L_r] of all context-parallel ranks, in order."""
    if len(parts) == 1:
        return parts[0]
    out = torch.full((response_length,), torch.nan, dtype=parts[0].dtype)
    for rank, part in enumerate(parts):
        (a, b), (c, d) = zigzag(total_length, response_length, rank, len(parts))
        out[a:b], out[c:d] = part[: b - a], part[b - a :]
    return out
