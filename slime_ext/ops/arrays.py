"""What numpy does faster than PyTorch with the tensors of a CPU."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Tokens that numpy adds in eight lanes: no number takes part in more than 26 additions; a byte counts them.
LONG = 128
quiet = functools.partial(np.errstate, over="ignore", invalid="ignore", divide="ignore")  # as PyTorch is


class Cuts(NamedTuple):
    """Where segments that follow each other without gaps are cut; int64 each, without those that hold no
    tokens."""

    held: np.ndarray  # [H] the segments that hold tokens
    starts: np.ndarray  # [H] their first tokens
    firsts: np.ndarray  # [H] their first blocks
    blocks: np.ndarray  # [B] the first tokens of blocks, which hold tokens of one segment


def integers(values: Sequence[int]) -> np.ndarray:
    """[N] int64, not to be written to."""
    return np.frombuffer(array("q", values), dtype=np.int64)


def cuts(lengths: np.ndarray, long: int = LONG) -> Cuts:
    """Of segments of these lengths, int64, in blocks of up to ``long``."""
    held = np.flatnonzero(lengths)
    lengths = lengths[held]
    starts, many = lengths.cumsum() - lengths, -(-lengths // long)
    firsts = many.cumsum() - many
    inside = np.arange(many.sum()) - np.repeat(firsts, many)
    return Cuts(held, starts, firsts, np.repeat(starts, many) + long * inside)


def is_array(values: Tensor) -> bool:
    """Whether numpy can look at a tensor: on the CPU, without gradient, of a dtype that it knows, and nothing
    that a compiler records."""
    plain = type(values) is Tensor and values.is_cpu and not values.requires_grad
    return plain and values.dtype is not torch.bfloat16


def of(values: Tensor) -> np.ndarray:
    """What ``is_array`` says yes to, as numpy sees it. What is made here, by ``new`` and by ``table`` is what
    operations are counted on."""
    return values.numpy()


def new(shape: int | tuple[int, ...], dtype: np.dtype | type = np.float64) -> np.ndarray:
    """To be written to."""
    return np.empty(shape, dtype)


def table(rows: Sequence[np.ndarray]) -> np.ndarray:
    """K arrays of one shape -> [K, ...] float64, in a fourth of the time of ``np.stack``."""
    return np.array(rows, np.float64)


def repeated(values: Tensor | np.ndarray, times: np.ndarray) -> Tensor:
    """[..., N] -> [..., sum of times], each value as often as its number says: a sixth of the time of an
    index."""
    return torch.from_numpy(
        np.repeat(values if isinstance(values, np.ndarray) else of(values), times, axis=-1)
    )


def finite(values: Tensor) -> Tensor:
    """Bool, shaped like the values."""
    return torch.from_numpy(np.isfinite(of(values)))


def differ(one: Tensor, other: Tensor) -> Tensor:
    """Bool, where two tensors of one shape are not equal: a quarter of the time of PyTorch's comparison."""
    return torch.from_numpy(np.not_equal(of(one), of(other)))


def reached(values: Tensor, edges: Sequence[float]) -> Tensor:
    """[T] -> [T] bytes, how many of the edges a value has reached, each in the dtype of the values."""
    values = of(values)
    flags = np.greater_equal(values, np.array(edges, dtype=values.dtype)[:, None])
    return torch.from_numpy(np.add.reduce(flags.view(np.uint8), 0, dtype=np.uint8))


def selected(flags: Tensor, values: Tensor, out: Tensor | None = None) -> Tensor:
    """``masked`` of tensors."""
    return torch.from_numpy(masked(of(flags), of(values), None if out is None else of(out)))


def masked(flags: np.ndarray, values: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """[T] values where the flags are set, 0 elsewhere, whatever stood there: their bits as an integer, times
    the flag. Half the time of a choice."""
    bits = f"i{values.itemsize}"
    found = new(values.shape, values.dtype) if out is None else out
    np.multiply(values.view(bits), flags.view(np.uint8), out=found.view(bits))
    return found


def sums(rows: Sequence[np.ndarray], where: Cuts) -> np.ndarray:
    """R rows [T] -> [R, H] float64, their sums over each segment: blocks in the dtype of the row, which is
    float32 or more, or bytes of 0 and 1; the blocks in float64. May overflow: the caller is ``quiet``."""
    if not rows:
        return new((0, len(where.held)))
    blocks = [np.add.reduceat(row, where.blocks, dtype=row.dtype) for row in rows]
    return np.add.reduceat(table(blocks), where.firsts, axis=1)


def beyond(values: np.ndarray, where: Cuts, below: bool, limit: float) -> np.ndarray:
    """[T] -> [H] bool: whether any token of a segment is smaller than -limit if ``below``, else larger; NaN
    is neither. Most calls find no such token, and look at segments no more."""
    extreme, compare, limit = (np.fmin, np.less, -limit) if below else (np.fmax, np.greater, limit)
    if compare(extreme.reduce(values, initial=limit), limit):
        return compare(extreme.reduceat(values, where.starts), limit)
    none = new(len(where.starts), np.bool_)
    none.fill(False)
    return none
