"""Sums over packed segments at the speed of a plain sum: a fixed grid of blocks, repaired where a block holds
more than one segment.

Nearly all blocks of 32 tokens lie inside one segment and are added without looking anything up. The few that
a segment begins or ends in are looked up and their tokens added one by one. That is for graphs and gradients:
what needs none of them is cut where the segments begin, by numpy where it can see the tokens.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slime_ext.ops import arrays
from slime_ext.ops.uploads import Parcel, host_ints

SHIFT = 5
BLOCK = 1 << SHIFT
PART = 2048  # tokens that are added on a device before parts are


class Extreme(NamedTuple):
    """A limit on the tokens of a row."""

    row: int
    below: bool  # whether tokens lie beyond it that are smaller than -limit, or those that are larger
    limit: float


def rounded(limit: float, values: Tensor | np.ndarray) -> float:
    """The limit as a comparison with these values takes it."""
    return struct.unpack("f", struct.pack("f", limit))[0] if values.itemsize == 4 else limit


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
    def parcel(self) -> Parcel:
        """What the host knows of this call and the device is told at once: the ``lengths``, 1 in two dtypes,
        and what others add."""
        parcel = Parcel(self.device)
        parcel.add("lengths", lambda: self.numbers.astype(np.int32))
        for dtype in (torch.float32, torch.float64):
            parcel.expect((1,), dtype)
        return parcel

    @cached_property
    def index(self) -> tuple[Tensor, Tensor]:
        """The shared blocks, blocks 0 and 1 among them; and where, among all block sums and all single
        tokens, each segment begins: its blocks [S + 1], its single tokens [S] and the end of all."""
        bounds = np.zeros(self.count + 1, dtype=np.int64)
        np.cumsum(self.numbers, out=bounds[1:])
        block = np.minimum(bounds >> SHIFT, self.blocks)  # only the last can lie beyond all whole blocks
        later = block[1:][(block[1:] != block[:-1]) & (block[1:] > 1)]
        shared = np.concatenate([(0, 1), later])
        rank = np.searchsorted(shared, block)
        begins = self.blocks + ((rank - block) << SHIFT) + bounds  # of single tokens
        shared = shared[shared < self.blocks]
        both = host_ints(np.concatenate([shared, block, begins[1:]]), self.device)
        return both[: len(shared)], both[len(shared) :]

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

        One operation and one for each row on a CPU, and two for each extreme; elsewhere two more, and one
        more where there are extremes.
        """
        if all(map(arrays.is_array, rows)):
            found = self.sums_of_arrays(list(map(arrays.of, rows)), extremes)
            return torch.from_numpy(np.array(found, dtype=np.float64))
        return self._together(rows, extremes)

    def sums_of_arrays(
        self, rows: Sequence[np.ndarray | None], extremes: Sequence[Extreme] = ()
    ) -> list[np.ndarray]:
        """The same where numpy sees the tokens, [S] each, those of extremes bool; a row that is None is 1 at
        every token."""
        with arrays.quiet():
            added = iter(self._in_full(arrays.sums([row for row in rows if row is not None], self._cuts)))
        sums = [self.numbers if row is None else next(added) for row in rows]
        beyond = (arrays.beyond(rows[row], self._cuts, below, limit) for row, below, limit in extremes)
        return sums + list(map(self._in_full, beyond))

    def _in_full(self, values: np.ndarray) -> np.ndarray:
        """[..., H] of the segments that hold tokens -> [..., S], 0 elsewhere."""
        held = self._cuts.held
        if len(held) == self.count:
            return values
        found = arrays.new((*values.shape[:-1], self.count), values.dtype)
        found.fill(0)
        found[..., held] = values
        return found

    @cached_property
    def _cuts(self) -> arrays.Cuts:
        return arrays.cuts(self.numbers)

    def _together(self, rows: Sequence[Tensor], extremes: Sequence[Extreme]) -> Tensor:
        many, tokens = len(rows), rows[0].numel()
        table = rows[0].new_empty(many, tokens, dtype=torch.float64)
        if not tokens:
            return table.new_zeros(many + len(extremes), self.count)
        for place, row in zip(table, rows, strict=True):
            place.copy_(row)
        parts, segments = self._sent(many, len(extremes))
        # Flat reductions, which CUDA spreads over all its processors.
        reduce = functools.partial(torch.segment_reduce, unsafe=True)
        found = [reduce(table.view(-1), "sum", offsets=parts, initial=0)]
        first = parts[: (parts.numel() - 1) // many + 1]
        for row, below, limit in extremes:
            kind, initial = ("min", torch.inf) if below else ("max", -torch.inf)
            most = reduce(table[row], kind, offsets=first, initial=initial)
            found.append(torch.lt(most, -limit, out=most) if below else torch.gt(most, limit, out=most))
        every = torch.cat(found) if extremes else found[0]
        return reduce(every, "sum", offsets=segments, initial=0).view(many + len(extremes), self.count)

    def _sent(self, rows: int, extremes: int) -> tuple[Tensor, Tensor]:
        """Where the parts of K rows of tokens begin, and where the segments of K + E rows of parts do; and
        the end of all."""
        names = ("parts", rows), ("segments", rows + extremes)
        starts = arrays.cuts(self.numbers, PART).blocks
        firsts = np.searchsorted(starts, self.numbers.cumsum() - self.numbers)
        self.parcel.add(names[0], lambda: _in_rows(starts, sum(self.lengths), rows))
        self.parcel.add(names[1], lambda: _in_rows(firsts, len(starts), rows + extremes))
        return tuple(map(self.parcel.take, names))

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


def _in_rows(begins: np.ndarray, width: int, rows: int) -> np.ndarray:
    """[N] where parts of a row begin -> [rows * N + 1] where those of all rows do, and the end."""
    return np.append(np.add.outer(np.arange(rows) * width, begins), rows * width)
