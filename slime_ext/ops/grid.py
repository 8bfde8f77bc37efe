"""Sums over packed segments at the speed of a plain sum: a fixed grid of blocks, repaired where a block holds
more than one segment.

Nearly all blocks of 32 tokens lie inside one segment and are added without looking anything up. The few that
a segment begins or ends in are looked up and their tokens added one by one. What numpy can see is cut
where the segments begin instead.
"""

from __future__ import annotations

import functools
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slime_ext.ops import arrays

SHIFT = 5
BLOCK = 1 << SHIFT
MANY = 256  # integers, from which a buffer is faster than torch.tensor


Numbers = float | tuple[float, ...] | tuple[tuple[float, ...], ...]


def host_numbers(numbers: Numbers, like: Tensor) -> Tensor:
    """Numbers known to the host, in the dtype and on the device of another tensor, without waiting for it;
    not to be written to, and held between calls on the CPU alone: a host may drop what a device holds."""
    if type(like) is not Tensor:  # a graph has constants of its own
        return torch.tensor(numbers, dtype=like.dtype, device=like.device)
    if like.is_cpu:
        return _on_host(numbers, like.dtype)
    if (alike := _alike(numbers)) is not None:
        return like.new_full(*alike)  # nothing to copy
    return _on_host(numbers, like.dtype).pin_memory().to(like.device, non_blocking=True)


@functools.lru_cache(maxsize=256)
def _alike(numbers: Numbers) -> tuple[tuple[int, ...], float] | None:
    """Shape and number where there is but one, in no table."""
    if not isinstance(numbers, tuple):
        return (), numbers
    (first, *others) = numbers
    alike = not isinstance(first, tuple) and all(number == first for number in others)
    return ((len(numbers),), first) if alike else None


@functools.lru_cache(maxsize=256)
def _on_host(numbers: Numbers, dtype: torch.dtype) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


class Extreme(NamedTuple):
    """A limit on the tokens of a row."""

    row: int
    below: bool  # whether tokens lie beyond it that are smaller than -limit, or those that are larger
    limit: float


def host_ints(
    values: Sequence[int] | np.ndarray, device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Integers known to the host as a tensor on ``device``, without waiting for the device."""
    if isinstance(values, np.ndarray):
        found = torch.from_numpy(values)
    elif len(values) < MANY:
        found = torch.tensor(values, dtype=dtype)
    else:
        found = torch.frombuffer(array("q" if dtype is torch.int64 else "i", values), dtype=dtype)
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)


def rounded(limit: float, dtype: torch.dtype) -> float:
    """The limit as a comparison in ``dtype`` takes it."""
    return struct.unpack("f", struct.pack("f", limit))[0] if dtype is torch.float32 else limit


@dataclass(frozen=True)
class Grid:
    """Where segments of the given lengths lie on the grid; segments follow each other without gaps.

    Args:
        lengths: [S] tokens of each segment, host integers.
        device: where the values lie.
    """

    lengths: tuple[int, ...]
    device: torch.device

    @cached_property
    def count(self) -> int:
        """S."""
        return len(self.lengths)

    @cached_property
    def numbers(self) -> np.ndarray:
        """[S] the lengths as int64, not to be written to."""
        return arrays.integers(self.lengths)

    @cached_property
    def blocks(self) -> int:
        """How many whole blocks there are; the tokens after them, 2 or more, are added one by one."""
        return max(sum(self.lengths) - 2, 0) >> SHIFT

    @cached_property
    def index(self) -> tuple[Tensor, Tensor]:
        """The shared blocks, blocks 0 and 1 among them; and where, among all block sums and all single
        tokens, each segment begins: its blocks [S + 1], its single tokens [S] and the end of all."""
        shared, block, begins = self._places
        both = host_ints(np.concatenate([shared, block, begins[1:]]), self.device)
        return both[: len(shared)], both[len(shared) :]

    @cached_property
    def _places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """On the host: the shared blocks, rising; the block [S + 1] that each segment begins in and the last
        ends in; where [S + 1] its single tokens begin among all block sums and all single tokens."""
        bounds = np.zeros(self.count + 1, dtype=np.int64)
        np.cumsum(self.numbers, out=bounds[1:])
        block = np.minimum(bounds >> SHIFT, self.blocks)  # only the last can lie beyond all whole blocks
        later = block[1:][(block[1:] != block[:-1]) & (block[1:] > 1)]
        shared = np.concatenate([(0, 1), later])
        rank = np.searchsorted(shared, block)
        begins = self.blocks + ((rank - block) << SHIFT) + bounds
        return shared[shared < self.blocks], block, begins

    def _offsets(self, rows: int) -> np.ndarray:
        """Where the parts of K rows of block sums and single tokens begin, and their end: for each segment
        its first block, which it shares, and its other blocks; then for each its single tokens."""
        _, block, begins = self._places
        count, end = self.count, begins[-1]
        parts = np.empty(3 * count, dtype=np.int64)
        parts[: 2 * count : 2] = block[:-1]
        parts[1 : 2 * count : 2] = np.minimum(np.maximum(block[:-1] + 1, 2), block[1:])  # 0 and 1 are shared
        parts[2 * count :] = begins[:-1]
        offsets = np.full(rows * len(parts) + 1, end * rows)
        np.add.outer(np.arange(rows) * end, parts, out=offsets[:-1].reshape(rows, -1))
        return offsets

    @cached_property
    def owners(self) -> tuple[Tensor, Tensor]:
        """The segment of each block [blocks] (of a shared one: any) and of each single token."""
        _, begins = self.index
        ends = (self.blocks, sum(self.lengths) - (self.blocks << SHIFT) + (len(self.index[0]) << SHIFT))
        parts = begins[: self.count + 1].diff(), begins[self.count :].diff()
        return tuple(torch.repeat_interleave(p, output_size=n) for p, n in zip(parts, ends, strict=True))

    def whole(self, values: Tensor) -> Tensor:
        """[T] -> [blocks, 32], a view."""
        return values[: self.blocks << SHIFT].view(-1, BLOCK)

    def spread(self, values: Tensor) -> Tensor:
        """[S] -> [T], block by block: a third of the time of looking up every token."""
        shared, _ = self.index
        blocks, singles = self.owners
        tokens = values.new_empty((self.blocks << SHIFT) + singles.numel() - (shared.numel() << SHIFT))
        rows = self.whole(tokens)
        rows.copy_(values.index_select(0, blocks).unsqueeze(1).expand(-1, BLOCK))
        one_by_one = values.index_select(0, singles)
        head = shared.numel() << SHIFT
        rows.index_copy_(0, shared, one_by_one[:head].view(-1, BLOCK))
        tokens[self.blocks << SHIFT :] = one_by_one[head:]
        return tokens

    def partial(self, values: Tensor, inside: str = "sum") -> Tensor:
        """[T] -> [N], the sum (or ``amax``) of each block, then the single tokens of the shared blocks."""
        shared, _ = self.index
        whole = self.whole(values)
        single = whole.index_select(0, shared).view(-1)
        return torch.cat([getattr(whole, inside)(1), single, values[self.blocks << SHIFT :]])

    def totals(self, partials: Sequence[Tensor]) -> Tensor:
        """K results of ``partial`` -> [K, S] float64, their sums over each segment."""
        table = torch.stack(list(partials))
        table.index_fill_(1, self.index[0], 0)  # their tokens are counted one by one
        if not table.shape[1]:
            # Zeros with a gradient: all ranks must take part in the backward pass of a sum over them.
            return table.double().sum(1, keepdim=True).expand(table.shape[0], self.count)
        return self._sums(table.double())

    def sums(self, rows: Sequence[Tensor], extremes: Sequence[Extreme] = ()) -> Tensor:
        """K rows [T] without gradient -> [K + E, S] float64: each row's sums over each segment, then for each
        extreme a number > 0 where any of the segment's tokens lies beyond its limit, 0 where none does.

        One operation and one for each row on a CPU, six elsewhere; and two for each extreme.
        """
        return (self._row_by_row if all(map(arrays.is_array, rows)) else self._together)(rows, extremes)

    def _row_by_row(self, rows: Sequence[Tensor], extremes: Sequence[Extreme]) -> Tensor:
        found, cuts = np.zeros((len(rows) + len(extremes), self.count)), self._cuts
        blocks = np.empty((len(rows), len(cuts.blocks)))
        with arrays.quiet():
            for sums, row in zip(blocks, rows, strict=True):
                arrays.add_blocks(row, cuts, sums)
            found[: len(rows), cuts.held] = arrays.add_up(blocks, cuts)
        for lies, (row, below, limit) in zip(found[len(rows) :], extremes, strict=True):
            lies[cuts.held] = arrays.beyond(rows[row], cuts, below, limit)
        return torch.from_numpy(found)

    @cached_property
    def _cuts(self) -> arrays.Cuts:
        return arrays.cuts(self.numbers)

    def _together(self, rows: Sequence[Tensor], extremes: Sequence[Extreme]) -> Tensor:
        wide = functools.reduce(torch.promote_types, (row.dtype for row in rows), torch.float32)
        table = torch.stack([row.to(wide) for row in rows])  # of one dtype: CUDA copies others one by one
        shared, _ = self.index
        whole = table[:, : self.blocks << SHIFT].unflatten(1, (self.blocks, BLOCK))
        singles = whole[:, shared].flatten(1).unbind()  # index_select would copy all rows
        rest = table[:, self.blocks << SHIFT :].unbind()
        levels = [(row, whole[row].amin(1) if below else whole[row].amax(1)) for row, below, _ in extremes]
        rows = [*enumerate(whole.sum(2).unbind()), *levels]
        parts = [part for row, level in rows for part in (level, singles[row], rest[row])]
        width = sum(map(len, parts[:3]))
        if not width:
            return table.new_zeros(len(rows), self.count, dtype=torch.float64)
        found = torch.cat(parts).double().view(len(rows), width)
        for row, (_, below, limit) in zip(found[len(table) :], extremes, strict=True):
            torch.lt(row, -limit, out=row) if below else torch.gt(row, limit, out=row)
        # One flat reduction, which CUDA spreads over all its processors.
        offsets = host_ints(self._offsets(len(rows)), self.device)
        flat = torch.segment_reduce(found.view(-1), "sum", offsets=offsets, unsafe=True, initial=0)
        of = flat.view(len(rows), -1)
        return of[:, 1 : 2 * self.count : 2] + of[:, 2 * self.count :]

    def _sums(self, table: Tensor) -> Tensor:
        """[K, N] block sums and single tokens, shared blocks 0 -> [K, S]."""
        _, begins = self.index
        rows, width = table.shape
        count = self.count
        # One flat reduction, which CUDA spreads over all its processors; each row ends in an empty segment.
        if isinstance(width, int):
            steps = host_ints([row * width for row in range(rows + 1)], self.device)
        else:  # a symbol, while a graph is written
            steps = torch.arange(rows + 1, device=self.device) * width
        segments = rows * (2 * count + 1)
        offsets = (begins + steps.unsqueeze(1)).view(-1)[: segments + 1]
        flat = torch.segment_reduce(table.view(-1), "sum", offsets=offsets, unsafe=True, initial=0)
        parts = flat.view(rows, 2 * count + 1)
        return parts[:, :count] + parts[:, count : 2 * count]
