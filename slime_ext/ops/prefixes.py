"""Minima over what comes before a token in its sequence, on every rank that shares the sequence."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from slime_ext.ops.grid import host_ints
from slime_ext.ops.segments import Segments


def prefix_min(segments: Segments, values: Tensor, max_of_negative: Tensor) -> Tensor:
    """[T] -> [T], the smallest value among the response tokens of the same sequence before each token; inf
    for none.

    Args:
        values: [T] on local tokens.
        max_of_negative: [S, slots] of ``Segments.max_shares`` of the negative response tokens, summed over
            the ranks; not read where this rank holds every token.
    """
    begins, lengths, slots = _held(segments)
    before = torch.where(segments.mask, values, torch.inf).roll(1)
    if segments.is_whole:
        before.index_fill_(0, begins, torch.inf)
    else:
        before.index_copy_(0, begins, _carried(-max_of_negative, slots).to(before.dtype))
    ordered, order = before.sort(stable=True)
    ranks = torch.empty_like(order).scatter(0, order, torch.arange(segments.size, device=segments.device))
    # One cumulative minimum over all pieces: each piece's keys lie below all keys of the pieces before it.
    keys = range(0, segments.size * len(lengths), segments.size or 1)
    keys = segments.repeat(host_ints(keys, segments.device), lengths)
    return ordered.index_select(0, (ranks - keys).cummin(0).values.add_(keys))


def _held(segments: Segments) -> tuple[Tensor, tuple[int, ...], Tensor]:
    """Of each piece that holds tokens: where it begins, how many it holds, and its place among all parts of
    all sequences."""
    lengths = [stop - start for _, start, stop, _ in segments.pieces]
    begins = accumulate(lengths, initial=0)
    slots = (sequence * segments.slots + slot for sequence, _, _, slot in segments.pieces)
    held = [each for each in zip(begins, lengths, slots, strict=False) if each[1]]
    begins, lengths, slots = zip(*held, strict=True) if held else ((), (), ())
    return host_ints(begins, segments.device), lengths, host_ints(slots, segments.device)


def _carried(lowest: Tensor, slots: Tensor) -> Tensor:
    """[S, slots] minima -> [P], the minimum over the parts of the sequence before each of these."""
    before = lowest.roll(1, 1).index_fill_(1, host_ints([0], lowest.device), torch.inf)
    return before.cummin(1).values.view(-1).index_select(0, slots)
