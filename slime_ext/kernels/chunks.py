"""Packed sequences cut into chunks: one program of a kernel each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from slime_ext.metrics.layout import POSITIONS
from slime_ext.ops.runs import Runs, runs
from slime_ext.ops.segments import Segments
from slime_ext.ops.uploads import host_ints

FEWEST, MOST = 128, 1024  # tokens of a chunk


@dataclass(frozen=True)
class Chunks:
    """Where chunks lie; none crosses a sequence border.

    A sequence of a million tokens is 1024 chunks, thousands of short ones are one each: both fill the chip.
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
        held = segments.local_lengths
        lanes = lanes_of(held)
        whole = _by_position(segments) if by_position else _sequences(segments.grid.numbers)
        columns = _cut(whole, lanes, len(held))
        parts = host_ints(np.concatenate(columns), segments.device).split([len(c) for c in columns])
        return cls(lanes, *parts)

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return self.owners.numel()


def lanes_of(lengths: Sequence[int]) -> int:
    """The tokens of the longest chunk: about the mean length."""
    mean = sum(lengths) // max(len(lengths), 1)
    return min(max(1 << max(mean - 1, 0).bit_length(), FEWEST), MOST)


def _cut(whole: Runs, lanes: int, count: int) -> tuple[np.ndarray, ...]:
    """Owners, begins, sizes, places and offsets of the chunks of these runs of ``count`` sequences."""
    many = np.maximum((whole.lengths + (lanes - 1)) // lanes, 1)
    stops, chunks = whole.lengths.cumsum(), many.cumsum()
    owners, places = whole.sequences.repeat(many), whole.bins.repeat(many)
    before = stops - whole.lengths - lanes * (chunks - many)  # its first token less those of chunks before it
    begins = before.repeat(many) + np.arange(0, lanes * len(owners), lanes)
    sizes = np.minimum(stops.repeat(many) - begins, lanes)
    offsets = np.zeros(count + 1, dtype=np.int64)
    np.bincount(owners, minlength=count).cumsum(out=offsets[1:])
    return owners, begins, sizes, places, offsets


def _sequences(lengths: np.ndarray) -> Runs:
    """Each sequence as one run."""
    every = np.arange(len(lengths))
    return Runs(every, lengths, np.zeros_like(every))


def _by_position(segments: Segments) -> Runs:
    """Runs of one bin, and an empty one for each sequence that has none: a chunk decides what becomes of
    it."""
    found = runs(segments, POSITIONS)
    missing = np.flatnonzero(np.bincount(found.sequences, minlength=segments.count) == 0)
    if not len(missing):
        return found
    none = np.zeros_like(missing)
    joined = [np.concatenate(both) for both in zip(found, (missing, none, none), strict=True)]
    order = np.argsort(joined[0], kind="stable")
    return Runs(*(column[order] for column in joined))
