"""Packed sequences cut into chunks: one program of a kernel each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from slime_ext.metrics.layout import POSITIONS
from slime_ext.ops.grid import host_ints
from slime_ext.ops.segments import Segments

FEWEST, MOST = 128, 2048  # tokens of a chunk
Cut = tuple[int, int, int, int]  # sequence, first token, tokens, bin of position


@dataclass(frozen=True)
class Chunks:
    """Where chunks lie; none crosses a sequence border.

    A sequence of a million tokens is 512 chunks, thousands of short ones are one each: both fill the chip.
    """

    lanes: int  # of every program, a power of 2
    owners: Tensor  # [C] int64, the sequence of each chunk
    begins: Tensor  # [C] its first token
    sizes: Tensor  # [C] its tokens
    places: Tensor  # [C] the bin of its tokens' position in the response; 0 where nobody asked
    offsets: Tensor  # [S + 1] the first chunk of each sequence

    @classmethod
    def of(cls, segments: Segments, *, by_position: bool = False) -> Chunks:
        """Cuts what this rank holds of its sequences.

        Args:
            by_position: whether no chunk may lie in two bins of position.
        """
        lengths = segments.local_lengths
        lanes = lanes_of(lengths)
        cuts = by_positions(segments, lanes) if by_position else plain(lengths, lanes)
        columns = list(zip(*cuts, strict=True)) or [()] * 4
        counts = [0] * (len(lengths) + 1)
        for owner in columns[0]:
            counts[owner + 1] += 1
        both = [*(n for column in columns for n in column), *accumulate(counts)]
        parts = host_ints(both, segments.device).split([len(columns[0])] * 4 + [len(counts)])
        return cls(lanes, *parts)

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return self.owners.numel()


def lanes_of(lengths: Sequence[int]) -> int:
    """The tokens of the longest chunk: about the mean length."""
    mean = sum(lengths) // max(len(lengths), 1)
    return min(max(1 << max(mean - 1, 0).bit_length(), FEWEST), MOST)


def plain(lengths: Sequence[int], lanes: int) -> list[Cut]:
    """Cuts of sequences one after the other; one without tokens is a chunk, which decides what becomes of
    it."""
    starts = accumulate(lengths, initial=0)
    return [
        (owner, begin, min(lanes, start + length - begin), 0)
        for owner, (start, length) in enumerate(zip(starts, lengths, strict=False))
        for begin in (range(start, start + length, lanes) if length else (start,))
    ]


def by_positions(segments: Segments, lanes: int) -> list[Cut]:
    """The same, cut also where the bins of position begin."""
    held: list[list[tuple[int, int]]] = [[] for _ in segments.lengths]
    for owner, start, stop, _ in segments.pieces:
        held[owner].append((start, stop))
    cuts: list[Cut] = []
    begin = 0
    for owner, pieces in enumerate(held):
        found = [cut for start, stop in pieces for cut in _within(start, stop, lanes)] or [(0, 0)]
        for size, place in found:
            cuts.append((owner, begin, size, place))
            begin += size
    return cuts


def _within(start: int, stop: int, lanes: int) -> Iterator[tuple[int, int]]:
    """Sizes and bins of the chunks of a piece."""
    while start < stop:
        place = bisect_right(POSITIONS, start)
        edge = POSITIONS[place] if place < len(POSITIONS) else stop
        end = min(start + lanes, edge, stop)
        yield end - start, place
        start = end
