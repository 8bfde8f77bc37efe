"""Packed tokens as runs: neighbours of one sequence whose positions lie in one bin, counted on the host."""

from __future__ import annotations

import functools
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
    lengths = _before(stops, edges)
    if not segments.is_whole:
        lengths -= _before(starts, edges)
    held = np.flatnonzero(lengths > 0)
    piece = held // lengths.shape[1]
    return Runs(sequences[piece], lengths.reshape(-1)[held], held - piece * lengths.shape[1])


def _before(positions: np.ndarray, edges: Sequence[int]) -> np.ndarray:
    """[P, 1] -> [P, E + 1], how many of the positions before these lie in each bin."""
    lows, widths = _bins(tuple(edges))
    found = positions - lows
    return np.clip(found, 0, widths, out=found)


@functools.lru_cache
def _bins(edges: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Where each bin begins, and how many positions it has."""
    lows = np.array((0, *edges), dtype=np.int64)
    return lows, np.append(np.diff(lows), np.iinfo(np.int64).max)


def pieces(segments: Segments) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[P] sequences, [P, 1] starts, [P, 1] stops of what this rank holds, int64."""
    if segments.is_whole:
        stops = segments.grid.numbers[:, None]
        return np.arange(len(stops)), np.zeros_like(stops), stops
    pieces = np.array(segments.pieces, dtype=np.int64).reshape(-1, 4)
    return pieces[:, 0], pieces[:, 1:2], pieces[:, 2:3]
