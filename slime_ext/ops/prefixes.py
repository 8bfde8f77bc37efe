"""Minima, sums and means over the tokens up to each one, on every rank that shares the sequence."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from slime_ext.ops.segments import Segments, as_numbers, host_ints


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


def prefix_sum(segments: Segments, values: Tensor, unit: str = "sequence") -> Tensor:
    """[T] -> [T] float64, the sum over the response tokens of the same turn or sequence up to and including
    each."""
    cells = segments.cells(unit)
    running = segments.zeroed(values).double()
    reach = 1  # each pass doubles how many tokens of its own cell a token has summed; a NaN stays in its cell
    while reach < max((stop - start for _, start, stop, _ in segments.local_shards), default=0):
        before = torch.where(cells[reach:] == cells[:-reach], running[:-reach], 0)
        running = torch.cat([running[:reach], running[reach:] + before])
        reach *= 2
    if segments.shards is None:
        return running
    units = segments.turn_bound if unit == "turn" else segments.count
    table = running.new_zeros(units * segments.shards_per_sequence)
    table = segments.all_sum(table.index_add(0, cells, segments.zeroed(values).double()))
    table = table.view(units, segments.shards_per_sequence)
    earlier = torch.nn.functional.pad(table, (1, 0)).cumsum(1)[:, :-1]
    return running + earlier.reshape(-1).index_select(0, cells)


def prefix_mean(segments: Segments, values: Tensor, unit: str = "sequence") -> Tensor:
    """[T] -> [T] float64, the mean over the same tokens as ``prefix_sum``; 0 for none."""
    count = prefix_sum(segments, as_numbers(segments.mask, torch.float64), unit)
    return prefix_sum(segments, values, unit) / count.clamp_min(1)
