"""Computes minima, sums and means over each token's prefix, however ranks split the sequence.

The prefix of a token is the part of its sequence, or of its turn, up to that token.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from slime_ext.ops.segments import Segments, as_numbers, host_ints

if TYPE_CHECKING:
    from torch import Tensor


def prefix_min(segments: Segments, values: Tensor, max_of_negative: Tensor) -> Tensor:
    """Finds the smallest value among the earlier response tokens of the same sequence.

    Args:
        values: [T] on local tokens.
        max_of_negative: [S, shards_per_sequence] ``Segments.local_maxima`` of -values, summed over the ranks.

    Returns:
        [T]; inf for a token without an earlier response token.
    """
    lengths, device = [stop - start for _, start, stop, _ in segments.local_shards], values.device
    ends = accumulate(lengths, initial=0)
    begins = {at: i for i, (at, n) in enumerate(zip(ends, lengths, strict=False)) if n}
    first_tokens, shards = host_ints([*begins, *begins.values()], device).view(2, -1)
    earlier = _min_of_earlier_shards(-max_of_negative).index_select(0, segments.shard_index)
    before = torch.where(segments.mask, values, torch.inf).roll(1)
    before = before.index_copy(0, first_tokens, earlier.index_select(0, shards).to(before.dtype))
    ordered, order = before.sort(stable=True)
    ranks = torch.empty_like(order).scatter(0, order, torch.arange(segments.size, device=device))
    # One cumulative minimum serves all shards, because each shard's keys are below those of earlier shards.
    keys = host_ints([i * segments.size for i in range(len(lengths))], device)
    keys = keys.repeat_interleave(host_ints(lengths, device), output_size=segments.size)
    return ordered.index_select(0, (ranks - keys).cummin(0).values + keys)


def _min_of_earlier_shards(lowest: Tensor) -> Tensor:
    """Finds, for each shard, the minimum over the earlier shards of its sequence.

    Takes each shard's own minimum, [S, shards], and returns [S x shards].
    """
    first = torch.full_like(lowest[:, :1], torch.inf)
    return torch.cat([first, lowest[:, :-1]], 1).cummin(1).values.view(-1)


def shard_sums(segments: Segments, values: Tensor, unit: str = "sequence") -> Tensor:
    """Adds up the values in each shard of each unit.

    Args:
        values: [T], 0 at masked tokens.

    Returns:
        [S or U, shards_per_sequence] float64. Shards of other ranks are 0, so the sum over ranks is the whole
        table.
    """
    units = segments.turn_bound if unit == "turn" else segments.count
    table = values.new_zeros(units * segments.shards_per_sequence, dtype=torch.float64)
    return table.index_add(0, segments.cells(unit), values.double()).view(units, segments.shards_per_sequence)


def prefix_sums(segments: Segments, values: Tensor, sums: Tensor, unit: str = "sequence") -> Tensor:
    """Adds up the values over each token's prefix in its unit, the token itself included.

    It adds pairs of numbers at distances 1, 2, 4, ..., and never across two shards. A difference of running
    sums over all tokens would lose digits, or be NaN, because of one extreme token in another sequence.

    Args:
        values: [T] on local tokens; only response tokens count.
        sums: ``shard_sums``, summed over the ranks.

    Returns:
        [T] float64.
    """
    places = segments.cells(unit)
    index = torch.arange(segments.size, device=values.device)
    begins = torch.where(places != places.roll(1), index, 0)
    within = index - (begins.cummax(0).values if segments.size else begins)
    running, distance = segments.zeroed(values).double(), 1
    while distance < max((stop - start for _, start, stop, _ in segments.local_shards), default=0):
        running = running + torch.where(within >= distance, running.roll(distance), 0)
        distance *= 2
    before = torch.cat([torch.zeros_like(sums[:, :1]), sums[:, :-1]], 1).cumsum(1).view(-1)
    return running + before.index_select(0, places)


def prefix_sum(segments: Segments, values: Tensor, unit: str = "sequence") -> Tensor:
    """Computes the shard sums, then adds up the values over prefixes with ``prefix_sums``.

    The shard sums cost one SUM over the ranks.
    """
    sums = segments.all_sum(shard_sums(segments, segments.zeroed(values), unit))
    return prefix_sums(segments, values, sums, unit)


def prefix_mean(segments: Segments, values: Tensor, unit: str = "sequence") -> Tensor:
    """Averages the values over each token's prefix in its unit, the token itself included.

    The shard sums of values and counts cost one SUM over the ranks.

    Returns:
        [T] float64; 0 for a token without response tokens in its prefix.
    """
    rows = segments.zeroed(values), as_numbers(segments.mask, torch.float64)
    sums = segments.all_sum(torch.stack([shard_sums(segments, row, unit) for row in rows]))
    total, count = (
        prefix_sums(segments, row, of_row, unit) for row, of_row in zip(rows, sums.unbind(), strict=True)
    )
    return total / count.clamp_min(1)


def response_order(segments: Segments) -> Tensor:
    """Numbers the response tokens of each sequence from 1.

    Returns:
        [T] int64: the number of response tokens of the same sequence up to and including each token.
    """
    mask, device = segments.full_mask, segments.full_mask.device
    counts = mask.cumsum(0)
    begins = host_ints(list(accumulate(segments.lengths, initial=0))[:-1], device)
    first = begins.repeat_interleave(host_ints(segments.lengths, device), output_size=len(mask))
    # Counts are integers, so a difference of running sums is exact here, unlike in ``prefix_sums``.
    order = counts - (counts - mask.long()).index_select(0, first)
    return order if segments.shards is None else order.index_select(0, segments.positions)
