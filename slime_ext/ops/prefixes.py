"""Minima and sums over what comes before a token in its sequence, on every rank that shares the sequence."""

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


def shard_sums(segments: Segments, values: Tensor) -> Tensor:
    """[T], 0 at masked tokens -> [S, shards_per_sequence] float64, the sum of each shard; 0 for the shards
    that other ranks hold, so that adding up over the ranks gives the whole table."""
    ends = list(accumulate((stop - start for _, start, stop, _ in segments.local_shards), initial=0))
    offsets = host_ints(ends, values.device)
    sums = torch.segment_reduce(values.double(), "sum", offsets=offsets, unsafe=True, initial=0)
    shape = (segments.count, segments.shards_per_sequence)
    return sums.new_zeros(shape[0] * shape[1]).index_copy(0, segments.shard_index, sums).view(shape)


def prefix_sums(segments: Segments, values: Tensor, sums: Tensor) -> Tensor:
    """[T] -> [T] float64, the sum over the response tokens of the same sequence up to and with each token.

    Adds in pairs of doubling distance, so that nothing of one shard reaches another: a sum of all tokens
    minus that of those before would round, or be NaN, wherever one sequence has an extreme token.

    Args:
        values: [T] on local tokens.
        sums: [S, shards_per_sequence] of ``shard_sums``, summed over the ranks.
    """
    lengths = [stop - start for _, start, stop, _ in segments.local_shards]
    begins = list(accumulate(lengths, initial=0))[:-1]
    within = host_ints(begins, values.device).repeat_interleave(
        host_ints(lengths, values.device), output_size=segments.size
    )
    within = torch.arange(segments.size, device=values.device) - within
    found, distance = segments.zeroed(values).double(), 1
    while distance < max(lengths, default=0):
        found = found + torch.where(within >= distance, found.roll(distance), 0)
        distance *= 2
    before = torch.cat([torch.zeros_like(sums[:, :1]), sums[:, :-1]], 1).cumsum(1).view(-1)
    places = segments.shard_index.repeat_interleave(
        host_ints(lengths, values.device), output_size=segments.size
    )
    return found + before.index_select(0, places)


def response_order(segments: Segments) -> Tensor:
    """[T] int64, how many response tokens of its sequence there are up to and with each token."""
    mask, device = segments.full_mask, segments.full_mask.device
    counts = mask.cumsum(0)
    begins = host_ints(list(accumulate(segments.lengths, initial=0))[:-1], device)
    first = begins.repeat_interleave(host_ints(segments.lengths, device), output_size=len(mask))
    order = counts - (counts - mask.long()).index_select(0, first)
    return order if segments.shards is None else order.index_select(0, segments.positions)
