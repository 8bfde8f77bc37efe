"""Minima over what comes before a token in its sequence, on every rank that shares the sequence."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from slime_ext.ops.segments import Segments, host_ints


def prefix_min(segments: Segments, values: Tensor, max_of_negative: Tensor) -> Tensor:
    """[T] -> [T], the smallest value among the response tokens of the same sequence before each token; inf
    for none.

    Args:
        values: [T] on local tokens.
        max_of_negative: [S, shards_per_sequence] of ``Segments.local_maxima`` of the negative response
            tokens, summed over the ranks.
    """
    lengths, device = [stop - start for _, start, stop, _ in segments.local_shards], values.device
    ends = accumulate(lengths, initial=0)
    begins = [(at, i) for i, (at, n) in enumerate(zip(ends, lengths, strict=False)) if n]
    first_tokens, shards = host_ints(begins, device).view(-1, 2).unbind(1)
    earlier = _min_of_earlier_shards(-max_of_negative).index_select(0, segments.shard_index)
    before = torch.where(segments.mask, values, torch.inf).roll(1)
    before = before.index_copy(0, first_tokens, earlier.index_select(0, shards).to(before.dtype))
    ordered, order = before.sort(stable=True)
    ranks = torch.empty_like(order).scatter(0, order, torch.arange(segments.size, device=device))
    # One cumulative minimum over all shards: each shard's keys lie below all keys of the shards before it.
    keys = host_ints([i * segments.size for i in range(len(lengths))], device)
    keys = keys.repeat_interleave(host_ints(lengths, device), output_size=segments.size)
    return ordered.index_select(0, (ranks - keys).cummin(0).values + keys)


def _min_of_earlier_shards(lowest: Tensor) -> Tensor:
    """[S, shards] minima -> [S x shards], the minimum over the shards of the sequence before each."""
    first = torch.full_like(lowest[:, :1], torch.inf)
    return torch.cat([first, lowest[:, :-1]], 1).cummin(1).values.view(-1)
