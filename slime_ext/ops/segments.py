"""Packed sequences of different lengths: each token's sequence and turn, and sums over them across ranks.

``T`` counts the response tokens that this rank holds, ``S`` the sequences, ``U`` the turns. A rank may hold
any part of a sequence, or none. The only parallelism here is ``all_sum``, a SUM all-reduce over the ranks
that share the sequences.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from slime_ext.errors import DataError

AllSum = Callable[[Tensor], Tensor]  # SUM over ranks, which may work in place: see ``require_contiguous``
# sequence, start, stop, number: response tokens start..stop-1, the shard with that number of the sequence
Shard = tuple[int, int, int, int]
BLOCK = 32  # tokens that are added in their own dtype before float64 takes over


def require_contiguous(values: Tensor) -> None:
    """Raises DataError unless a tensor may go into a collective, because that writes to it in place.

    In an expanded or overlapping tensor several numbers share memory: gloo then writes beyond its end. A
    transposed one is read in the order of its memory, which may differ between ranks.
    """
    if not values.is_contiguous():
        raise DataError(
            f"all_sum: expected a contiguous tensor, got one of shape {list(values.shape)} with strides "
            f"{list(values.stride())}: an all-reduce writes in place; pass values.contiguous()"
        )


def identity(values: Tensor) -> Tensor:
    """The ``all_sum`` of a process that holds every token. It refuses what an all-reduce refuses, so that a
    test on one process finds it."""
    require_contiguous(values)
    return values


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU tensor to ``device`` without waiting for it."""
    if device.type == "cpu":
        return values
    pinned = values.pin_memory() if device.type == "cuda" else values
    return pinned.to(device, non_blocking=True)


def as_bytes(flags: Tensor) -> Tensor:
    """Bool -> uint8, the same memory: on a CPU a conversion reads bytes seven times as fast as bool."""
    return flags.view(torch.uint8)


def as_numbers(flags: Tensor, dtype: torch.dtype) -> Tensor:
    """Bool -> 0 and 1."""
    return as_bytes(flags).to(dtype)


def chunks(table: Tensor, most: int) -> list[slice]:
    """Slices of the rows of a [T, K] table, each of at most ``most`` entries and at least one row."""
    step = max(1, most // max(table.shape[1], 1))
    return [slice(at, at + step) for at in range(0, len(table), step)]


def host_ints(values: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of Python integers on ``device``, without waiting for it."""
    if not values:
        return torch.empty(0, dtype=dtype, device=device)
    # From an array, because a tensor made of a list looks at each element: for 512 half of the time.
    packed = array("q" if dtype is torch.int64 else "i", values)
    return to_device(torch.frombuffer(packed, dtype=dtype), device)


@dataclass(frozen=True)
class Segments:
    """The packed response tokens of one micro-batch on one rank.

    Args:
        lengths: [S] full response lengths, host integers.
        shards: what this rank holds, in packed order: sequences in order, the shards of one sequence next to
            each other. None: every token.
        full_mask: [sum of lengths] bool, the response mask of all sequences, the same on every rank.
        shards_per_sequence: number of shards, by position, into which the ranks cut a sequence.
        all_sum: SUM over the ranks that share the sequences.
    """

    lengths: tuple[int, ...]
    shards: tuple[Shard, ...] | None
    full_mask: Tensor
    shards_per_sequence: int = 1
    all_sum: AllSum = field(default=identity, compare=False)

    @classmethod
    def whole(cls, lengths: Sequence[int], mask: Tensor) -> Segments:
        """One process that holds every token. ``mask``: [T], not 0 where the behavior policy sampled the
        token."""
        return cls(tuple(lengths), None, mask.to(torch.bool))

    @property
    def count(self) -> int:
        """S."""
        return len(self.lengths)

    @property
    def local_shards(self) -> tuple[Shard, ...]:
        """The shards of this rank; whole sequences if it holds every token."""
        return tuple((i, 0, n, 0) for i, n in enumerate(self.lengths)) if self.shards is None else self.shards

    @cached_property
    def local_lengths(self) -> tuple[int, ...]:
        """[S] how many tokens of each sequence this rank holds."""
        if self.shards is None:
            return self.lengths
        held = [0] * self.count
        for sequence, start, stop, _ in self.shards:
            held[sequence] += stop - start
        return tuple(held)

    @cached_property
    def size(self) -> int:
        """T."""
        return sum(self.local_lengths)

    @cached_property
    def ids(self) -> Tensor:
        """[T] int32, the sequence of each local token."""
        lengths = host_ints(self.local_lengths, self.full_mask.device, torch.int32)
        return torch.repeat_interleave(lengths, output_size=self.size)

    @cached_property
    def positions(self) -> Tensor:
        """[T] int64, the index of each local token among all tokens of all sequences."""
        begins = list(accumulate(self.lengths, initial=0))
        return self._counting_from([begins[i] + start for i, start, _, _ in self.local_shards])

    @cached_property
    def within(self) -> Tensor:
        """[T] int64, the index of each local token in its own response."""
        return self._counting_from([start for _, start, _, _ in self.local_shards])

    @cached_property
    def mask(self) -> Tensor:
        """[T] bool, the response mask of the local tokens."""
        return self.full_mask if self.shards is None else self.full_mask.index_select(0, self.positions)

    @cached_property
    def turn_ids(self) -> Tensor:
        """[T] int64, the turn of each local token, from 1: a maximal run of response mask 1 in one sequence.

        A token outside every turn has the id of the turn before it, 0 for none; no reduction counts it.
        """
        begins = [b for b, n in zip(accumulate(self.lengths, initial=0), self.lengths, strict=False) if n]
        before = self.full_mask.roll(1).index_fill(0, host_ints(begins, self.full_mask.device), False)
        ids = (self.full_mask > before).cumsum(0)
        return ids if self.shards is None else ids.index_select(0, self.positions)

    @cached_property
    def turn_bound(self) -> int:
        """U, one more than an upper bound of the turn ids, known without waiting for the device."""
        return 1 + sum((n + 1) // 2 for n in self.lengths)

    def zeroed(self, values: Tensor) -> Tensor:
        """[T] -> [T] with 0 at masked tokens. They may hold NaN, so they are selected away, not multiplied by
        0."""
        return torch.where(self.mask, values, 0)

    def expand(self, values: Tensor) -> Tensor:
        """[S] -> [T], the sequence's value at each of its local tokens."""
        return values.index_select(0, self.ids)

    def expand_to_tokens(self, unit: str, values: Tensor) -> Tensor:
        """A value per token, turn [U] or sequence [S] -> the same at each of its local tokens [T]."""
        if unit == "token":
            return values
        return values.index_select(0, self.turn_ids) if unit == "turn" else self.expand(values)

    def local_sums(self, rows: Sequence[Tensor]) -> Tensor:
        """K tensors [T], 0 at masked tokens -> [K, S] float64, this rank's share of the sums over each
        sequence; of bool the count.

        Blocks of 32 tokens of one sequence are added in the row's own dtype, then the blocks in float64. The
        tokens of a block that several sequences share are added one by one, so that a NaN stays in its
        sequence. With u the unit roundoff of the dtype, |error| <= 31 u sum|x| + (number of blocks) 2^-53
        sum|x|: in float32 1.9e-6 of sum|x| at any length, where one sequential float32 sum of 128k tokens
        guarantees 7.9e-3.
        """
        dtypes = {row.dtype for row in rows}
        if len(dtypes - {torch.bool}) > 1:  # in one table all would be added in the widest
            of = {dtype: iter(self.local_sums([x for x in rows if x.dtype is dtype])) for dtype in dtypes}
            return torch.stack([next(of[row.dtype]) for row in rows])
        count, shared, bounds = self.blocks
        rows = [as_bytes(row) if row.dtype is torch.bool else row for row in rows]
        padding = rows[0].new_zeros(count * BLOCK - self.size)
        blocks = torch.cat([part for row in rows for part in (row, padding)]).view(len(rows), count, BLOCK)
        alone = blocks.sum(2).index_fill(1, shared, 0)  # filled, not multiplied: 0 times NaN is NaN
        single = blocks.index_select(1, shared).view(len(rows), -1)
        table = torch.cat([alone, single], 1).double()
        width = table.shape[1]
        if not width:  # zeros with a gradient: all ranks take part in the backward pass of a sum over them
            return table.new_zeros(len(rows), self.count) + table.sum()
        starts = torch.arange(0, (len(rows) + 1) * width, width, device=table.device)
        offsets = (starts[:, None] + bounds).view(-1)[: len(rows) * len(bounds) + 1]
        # One segment_reduce over all rows: of one dimension it is a scan on CUDA, of two a loop over each
        # segment.
        sums = torch.segment_reduce(table.view(-1), "sum", offsets=offsets, unsafe=True, initial=0)
        sums = sums.view(len(rows), -1)
        return sums[:, : self.count] + sums[:, self.count + 1 : -1]

    @cached_property
    def blocks(self) -> tuple[int, Tensor, Tensor]:
        """``plan_of_blocks`` of the local tokens, on their device."""
        count, shared, bounds = plan_of_blocks(self.local_lengths)
        both = to_device(torch.cat([shared, bounds]), self.full_mask.device)
        return count, both[: len(shared)], both[len(shared) :]

    def local_maxima(self, values: Tensor) -> Tensor:
        """[T], -inf at masked tokens -> [S, shards_per_sequence] float64, the maximum of each shard.

        0 for shards of other ranks, so the sum over ranks is the whole table.
        """
        ends = list(accumulate((stop - start for _, start, stop, _ in self.local_shards), initial=0))
        offsets = host_ints(ends, self.full_mask.device)
        highest = torch.segment_reduce(values, "max", offsets=offsets, unsafe=True, initial=-torch.inf)
        shape = (self.count, self.shards_per_sequence)
        table = highest.new_zeros(shape[0] * shape[1], dtype=torch.float64)
        return table.index_copy(0, self.shard_index, highest.double()).view(shape)

    @cached_property
    def shard_index(self) -> Tensor:
        """[local shards] int64, the index of each local shard among all shards of all sequences."""
        places = [i * self.shards_per_sequence + number for i, _, _, number in self.local_shards]
        return host_ints(places, self.full_mask.device)

    def cells(self, unit: str) -> Tensor:
        """[T] int64, the index of each local token's shard among all shards of all turns or sequences."""
        ids = self.turn_ids if unit == "turn" else self.ids.long()
        if self.shards is None:
            return ids * self.shards_per_sequence
        lengths = host_ints([stop - start for _, start, stop, _ in self.shards], self.full_mask.device)
        numbers = host_ints([number for _, _, _, number in self.shards], self.full_mask.device)
        return ids * self.shards_per_sequence + numbers.repeat_interleave(lengths, output_size=self.size)

    def local_turn_sums(self, values: Tensor) -> Tensor:
        """[T], 0 at masked tokens -> [U] float64, this rank's share of the sums over each turn."""
        return values.new_zeros(self.turn_bound, dtype=torch.float64).index_add(
            0, self.turn_ids, values.double()
        )

    def local_turn_maxima(self, values: Tensor) -> Tensor:
        """[T], -inf at masked tokens -> [U, shards_per_sequence, 2] float64: the maximum of each shard of a
        turn, 0 where this rank holds nothing of it; and 1 where it holds any."""
        index = self.cells("turn")
        table = values.new_full(
            (self.turn_bound * self.shards_per_sequence,), -torch.inf, dtype=torch.float64
        )
        table = table.scatter_reduce(0, index, values.double(), "amax").view(self.turn_bound, -1)
        held = table > -torch.inf
        # Only SUMs go over ranks: one rank holds a shard, the others add 0, and the flag tells 0 from none.
        return torch.stack([torch.where(held, table, 0), held.double()], 2)

    def sum(self, values: Tensor, unit: str = "sequence") -> Tensor:
        """[T] -> one float64 per unit, over the response tokens of every rank."""
        return self.all_sum(self._local_sums_of(unit, [self.zeroed(values)]))[0]

    def mean(self, values: Tensor, unit: str = "sequence") -> Tensor:
        """[T] -> one float64 per unit; 0 for a unit without response tokens."""
        rows = [self.zeroed(values), self.mask]
        total, count = self.all_sum(self._local_sums_of(unit, rows))
        return torch.div(total, count.clamp_min(1))

    def max(self, values: Tensor, unit: str = "sequence") -> Tensor:
        """[T] -> one float64 per unit; -inf for a unit without response tokens."""
        values = torch.where(self.mask, values, -torch.inf)
        local = self.local_turn_maxima(values) if unit == "turn" else self.local_maxima(values)
        return highest(unit, self.all_sum(local))

    def _local_sums_of(self, unit: str, rows: Sequence[Tensor]) -> Tensor:
        return torch.stack([*map(self.local_turn_sums, rows)]) if unit == "turn" else self.local_sums(rows)

    def _counting_from(self, begins: Sequence[int]) -> Tensor:
        """[T] int64, counting up through each local shard from a given start."""
        lengths = [stop - start for _, start, stop, _ in self.local_shards]
        ends, device = accumulate(lengths, initial=0), self.full_mask.device
        shifts = host_ints([begin - at for begin, at in zip(begins, ends, strict=False)], device)
        shifts = shifts.repeat_interleave(host_ints(lengths, device), output_size=self.size)
        return shifts + torch.arange(self.size, device=device)


def plan_of_blocks(lengths: Sequence[int]) -> tuple[int, Tensor, Tensor]:
    """Plans exact sums per sequence: whole blocks are added first, then single tokens.

    Args:
        lengths: [S] tokens of each sequence, packed one after the other.

    Returns:
        The number of blocks, the last one filled up with zeros; the numbers [N] of the shared blocks, whose
        tokens are added one by one; and [2 S + 2] bounds in a table of the sums of all blocks, followed by
        the tokens of the shared ones: where each sequence's blocks begin and where they end (S + 1), then the
        same for its single tokens.

    Shared are the blocks with tokens of several sequences, the first two, and those with the last 2 to 33
    tokens.

    >>> plan_of_blocks([70, 70])
    (5, tensor([0, 1, 2, 4]), tensor([  0,   2,   4,   5,  75, 113]))
    """
    size = sum(lengths)
    count, whole = -(-size // BLOCK), max(size - 2, 0) // BLOCK
    first = min(whole, 1)
    bounds = host_ints([0, *accumulate(lengths)], torch.device("cpu"))
    block = bounds // BLOCK
    at = block.clamp(first, whole)
    shared, place = torch.unique_consecutive(at, return_inverse=True)
    shared = torch.cat([bounds[:first], shared, torch.arange(whole, count)[1:]])[:count]
    # ``place`` counts from block ``first``; the tokens of a shared block keep their order.
    singles = torch.add(bounds, place - at, alpha=BLOCK) + (count + first * BLOCK)
    return count, shared, torch.cat([block, singles])


def highest(unit: str, maxima: Tensor) -> Tensor:
    """The maximum of each unit from ``local_maxima`` or ``local_turn_maxima``, summed over the ranks."""
    if unit == "turn":
        maxima = torch.where(maxima[..., 1] > 0, maxima[..., 0], -torch.inf)
    return maxima.amax(1)
