"""Chunks against a plain loop over tokens."""

import random
from bisect import bisect_right

import pytest
import torch

from slime_ext.kernels.chunks import Chunks
from slime_ext.metrics.layout import POSITIONS
from slime_ext.ops.segments import Segments

LENGTHS = [(5,), (0,), (), (0, 3, 0, 0, 700, 1, 0), (5000, 17), tuple(range(40)), (70000, 1)]


def loop(segments, lanes, *, by_position):
    """Token by token: a chunk ends where its sequence or its room ends, or its piece or bin of position."""
    chunks, begin = [], 0
    for sequence in range(segments.count):
        empty = True
        for owner, start, stop, _ in segments.pieces:
            for position in range(start, stop) if owner == sequence else ():
                place = bisect_right(POSITIONS, position) if by_position else 0
                cut = by_position and position == start
                new = empty or cut or place != chunks[-1][3] or chunks[-1][2] == lanes
                if new:
                    chunks.append([sequence, begin, 0, place])
                chunks[-1][2] += 1
                begin, empty = begin + 1, False
        if empty:
            chunks.append([sequence, begin, 0, 0])
    return chunks


def pieces_of(lengths, rng):
    """A part of every sequence, of some two."""
    for sequence, length in enumerate(lengths):
        cuts = sorted(rng.randint(0, length) for _ in range(4))
        yield from ((sequence, *cuts[i : i + 2], i) for i in (0, 2))


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_chunks_are_those_of_a_loop_over_tokens(lengths, shared, by_position):
    mask = torch.ones(sum(lengths), dtype=torch.bool)
    segments = Segments.whole(lengths, mask)
    if shared:
        segments = Segments(lengths, tuple(pieces_of(lengths, random.Random(len(lengths)))), mask, 4)
    chunks = Chunks.of(segments, by_position=by_position)
    columns = (chunks.owners, chunks.begins, chunks.sizes, chunks.places)
    expected = loop(segments, chunks.lanes, by_position=by_position)
    assert [list(row) for row in zip(*(c.tolist() for c in columns), strict=True)] == expected
    owners = [row[0] for row in expected]
    assert chunks.offsets.tolist() == [owners.index(s) for s in range(len(lengths))] + [len(expected)]
