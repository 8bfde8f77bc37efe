"""Minima over what comes before a token in its sequence, on every rank that shares the sequence."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slime_ext.ops import arrays
from slime_ext.ops.segments import Segments
from slime_ext.ops.uploads import host_ints


def prefix_min(segments: Segments, values: Tensor, max_of_negative: Tensor) -> Tensor:
    """[T] -> [T], the smallest value among the response tokens of the same sequence before each token; inf
    for none.

    Args:
        values: [T] on local tokens.
        max_of_negative: [S, slots] of ``Segments.max_shares`` of the negative response tokens, summed over
            the ranks; not read where this rank holds every token.
    """
    lengths = [stop - start for _, start, stop, _ in segments.pieces]
    cuts = arrays.cuts(arrays.integers(lengths))
    begins = host_ints(cuts.starts, segments.device)
    before = torch.where(segments.mask, values, torch.inf).roll(1)
    if segments.is_whole:
        before.index_fill_(0, begins, torch.inf)
    else:
        slots = segments.piece_slots.index_select(0, host_ints(cuts.held, segments.device))
        before.index_copy_(0, begins, _carried(-max_of_negative, slots).to(before.dtype))
    ordered, order = before.sort(stable=True)
    ranks = torch.empty_like(order).scatter(0, order, torch.arange(segments.size, device=segments.device))
    # One cumulative minimum over all pieces: each piece's keys lie below all keys of the pieces before it.
    keys = host_ints(np.arange(len(lengths)) * segments.size, segments.device)
    keys = segments.repeat(keys, lengths)
    return ordered.index_select(0, (ranks - keys).cummin(0).values.add_(keys))


def _carried(lowest: Tensor, slots: Tensor) -> Tensor:
    """[S, slots] minima -> [P], the minimum over the parts of the sequence before each of these."""
    before = lowest.roll(1, 1).index_fill_(1, host_ints([0], lowest.device), torch.inf)
    return before.cummin(1).values.view(-1).index_select(0, slots)
