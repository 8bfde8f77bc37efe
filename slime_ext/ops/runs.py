"""Packed tokens as runs: neighbours of one sequence whose positions lie in one bin, counted on the host."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from slime_ext.ops.segments import Segments


class Runs(NamedTuple):
    """In packed order, int64 each."""

    sequences: np.ndarray  # [R] the sequence
    lengths: np.ndarray  # [R] tokens, at least 1
    bins: np.ndarray  # [R] how many edges their positions have reached


def runs(segments: Segments, edges: Sequence[int]) -> Runs:
    """What this rank holds, cut where a position in the response reaches an edge."""
    sequences, starts, stops = pieces(segments)
    cuts = np.clip(np.array(edges, dtype=np.int64), starts, stops)
    lengths = np.diff(np.concatenate([starts, cuts, stops], 1), axis=1).reshape(-1)
    bins = np.tile(np.arange(len(edges) + 1), len(sequences))
    held = lengths > 0
    return Runs(np.repeat(sequences, len(edges) + 1)[held], lengths[held], bins[held])


def pieces(segments: Segments) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[P] sequences, [P, 1] starts, [P, 1] stops of what this rank holds, int64."""
    if segments.is_whole:
        stops = np.frombuffer(array("q", segments.lengths), dtype=np.int64)[:, None]
        return np.arange(len(stops)), np.zeros_like(stops), stops
    pieces = np.array(segments.pieces, dtype=np.int64).reshape(-1, 4)
    return pieces[:, 0], pieces[:, 1:2], pieces[:, 2:3]
