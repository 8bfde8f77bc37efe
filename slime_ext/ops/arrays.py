"""What numpy does faster than PyTorch with the tensors of a CPU."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# What a call counts for beside PyTorch's operations.
OPERATIONS = {"repeated": 1, "finite": 1, "differ": 1, "add_blocks": 1, "add_up": 1}
OPERATIONS |= {"counted": 1, "selected": 1, "leading_bits": 1, "add_squares": 1}
OPERATIONS |= {"reached": 2, "ends": 3, "beyond": 2}
# Tokens that numpy adds in eight lanes: no number takes part in more than 26 additions; a byte counts them.
LONG = 128
quiet = functools.partial(np.errstate, over="ignore", invalid="ignore")  # as PyTorch is


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


def repeated(values: Tensor | np.ndarray, times: np.ndarray) -> Tensor:
    """[..., N] -> [..., sum of times], each value as often as its number says: a sixth of the time of an
    index."""
    return torch.from_numpy(np.repeat(np.asarray(values), times, axis=-1))


def finite(values: Tensor) -> Tensor:
    """Bool, shaped like the values."""
    return torch.from_numpy(np.isfinite(values.numpy()))


def differ(one: Tensor, other: Tensor) -> Tensor:
    """Bool, where two tensors of one shape are not equal: a quarter of the time of PyTorch's comparison."""
    return torch.from_numpy(np.not_equal(one.numpy(), other.numpy()))


def counted(flags: Tensor) -> Tensor:
    """[T] bool -> [1] int64, how many are set: a fifth of the time of a sum."""
    return torch.from_numpy(np.array([np.count_nonzero(flags.numpy())]))


@quiet()
def add_squares(blocks: Tensor, out: Tensor) -> None:
    """[K, N, B] -> [K, N], the sums of the squares in each block, of which none is written down."""
    blocks = blocks.numpy()
    np.einsum("knb,knb->kn", blocks, blocks, out=out.numpy())


def reached(values: Tensor, edges: Sequence[float]) -> Tensor:
    """[T] -> [T] bytes, how many of the edges a value has reached, each in the dtype of the values."""
    values = values.numpy()
    flags = np.greater_equal(values, np.array(edges, dtype=values.dtype)[:, None])
    return torch.from_numpy(np.add.reduce(flags.view(np.uint8), 0, dtype=np.uint8))


def selected(flags: Tensor, values: Tensor, out: Tensor | None = None) -> Tensor:
    """[T] values where the flags are set, 0 elsewhere, whatever stood there: their bits as an integer, times
    the flag. Half the time of a choice."""
    bits, values = f"i{values.itemsize}", values.numpy()
    found = np.empty(values.shape, values.dtype) if out is None else out.numpy()
    np.multiply(values.view(bits), flags.numpy().view(np.uint8), out=found.view(bits))
    return torch.from_numpy(found)


def leading_bits(values: Tensor, shift: int) -> Tensor:
    """[T] float32 -> [T] int32, the bits of a number without the last ``shift``, the sign first."""
    return torch.from_numpy((values.numpy().view(np.uint32) >> shift).view(np.int32))


def ends(flags: Tensor, values: Tensor, room: Tensor) -> Tensor:
    """[T] -> [2], the largest and the negated smallest of the values, which are 0 where the flags are not
    set; these do not count, nor does NaN; -inf for none.

    Args:
        room: [T] of the values' dtype, to work in.
    """
    values = values.numpy()
    highest, lowest = values.max(initial=-np.inf), values.min(initial=np.inf)
    if not highest > 0 > lowest:  # else both are a flagged value's, and no NaN is among them
        with quiet():
            values = np.divide(values, flags.numpy().view(np.uint8), out=room.numpy())  # 0 / 0 is NaN
        highest, lowest = np.fmax.reduce(values, initial=-np.inf), np.fmin.reduce(values, initial=np.inf)
    return torch.from_numpy(np.array([highest, -lowest], dtype=values.dtype))


def add_blocks(values: Tensor, where: Cuts, out: np.ndarray) -> None:
    """[T] -> [B] float64, the sum of each block, added in the dtype of the values: float32 or more, or bytes
    of 0 and 1. May overflow: the caller is ``quiet``."""
    values = values.numpy()
    out[:] = np.add.reduceat(values, where.blocks, dtype=values.dtype)


def add_up(blocks: np.ndarray, where: Cuts) -> np.ndarray:
    """[K, B] float64 -> [K, H], the sums of each segment's blocks."""
    return np.add.reduceat(blocks, where.firsts, axis=1)


def beyond(values: Tensor, where: Cuts, below: bool, limit: float) -> np.ndarray:
    """[T] -> [H] bool: whether any token of a segment is smaller than -limit if ``below``, else larger; NaN
    is neither."""
    if below:
        return np.fmin.reduceat(values.numpy(), where.starts) < -limit
    return np.fmax.reduceat(values.numpy(), where.starts) > limit
