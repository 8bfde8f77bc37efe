"""Packed variable-length sequences: which unit a token belongs to, and how to reduce over a unit on every
rank that shares it.

``T`` counts the response tokens that this rank holds, ``S`` the sequences, ``U`` the turns. A rank may hold
any part of a sequence, or nothing of it; ``all_sum`` (a SUM over those ranks) is all that this module knows
of parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, repeat

import torch
from torch import Tensor

from slime_ext.ops import arrays
from slime_ext.ops.grid import Grid
from slime_ext.ops.uploads import Numbers, Parcel, host_ints, host_numbers

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # as wide as a number, by its bytes
AllSum = Callable[[Tensor], Tensor]
Piece = tuple[
    int, int, int, int
]  # sequence, start, stop, slot: response tokens start..stop-1 of that sequence


@dataclass(frozen=True)
class Whole:
    """The pieces of a process that holds every token: its sequences, made one by one where somebody asks."""

    lengths: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Piece]:
        return zip(range(len(self.lengths)), repeat(0), self.lengths, repeat(0), strict=False)


def identity(values: Tensor) -> Tensor:
    """The ``all_sum`` of a process that holds every token."""
    return values


def is_traced(values: Tensor) -> bool:
    """Whether operations are being recorded for a compiler, which wants them plain."""
    return type(values) is not Tensor


def as_numbers(flags: Tensor, dtype: torch.dtype) -> Tensor:
    """Bool -> 0 and 1; through bytes, which on CPU is four times as fast as from bool."""
    return flags.to(dtype) if is_traced(flags) else flags.view(torch.uint8).to(dtype)


def as_bytes(flags: Tensor) -> Tensor:
    """Bool -> 0 and 1, as bytes where nobody compiles."""
    return flags.float() if is_traced(flags) else flags.view(torch.uint8)


def selected(flags: Tensor, values: Tensor) -> Tensor:
    """[T] values where the flags are set, 0 elsewhere, whatever stood there: their bits as an integer, times
    the flag. A choice would have to be told 0 on the device first."""
    if arrays.is_array(values):
        return arrays.selected(flags, values)
    if is_traced(flags) or values.requires_grad:
        return torch.where(flags, values, 0)
    return (values.view(INTEGERS[values.itemsize]) * flags).view(values.dtype)


def selected_(flags: Tensor, values: Tensor) -> Tensor:
    """The same of values that nobody else holds, in place where that can be."""
    if arrays.is_array(values):
        return arrays.selected(flags, values, values)
    return selected(flags, values)


@dataclass(frozen=True)
class Segments:
    """The packed response tokens of one micro-batch on one rank.

    Args:
        lengths: [S] full response lengths, host integers.
        pieces: what this rank holds, in packed order; the pieces of one sequence are neighbours, and the
            sequences in their order.
        full_mask: [sum of lengths] bool, the response mask of all sequences, the same on every rank.
        slots: in how many parts, in order of position, the ranks together cut a sequence.
        all_sum: SUM over the ranks that share the sequences.
    """

    lengths: tuple[int, ...]
    pieces: tuple[Piece, ...] | Whole
    full_mask: Tensor
    slots: int = 1
    all_sum: AllSum = field(default=identity, compare=False)

    @classmethod
    def whole(cls, lengths: Sequence[int], mask: Tensor) -> Segments:
        """One process that holds every token. ``mask``: [T], not 0 where the behavior policy sampled the
        token."""
        return cls(tuple(lengths), Whole(tuple(lengths)), mask.to(torch.bool))

    @cached_property
    def count(self) -> int:
        """S."""
        return len(self.lengths)

    @property
    def device(self) -> torch.device:
        return self.full_mask.device

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds every token."""
        return self.slots == 1

    @cached_property
    def local_lengths(self) -> tuple[int, ...]:
        """[S] how many tokens of each sequence this rank holds."""
        if self.is_whole:
            return self.lengths
        held = [0] * self.count
        for sequence, start, stop, _ in self.pieces:
            held[sequence] += stop - start
        return tuple(held)

    @cached_property
    def size(self) -> int:
        """T."""
        return sum(self.local_lengths)

    @cached_property
    def ids(self) -> Tensor:
        """[T] int64, the sequence of each local token."""
        # The index form of repeat_interleave is four times as fast as repeating an arange.
        return torch.repeat_interleave(host_ints(self.local_lengths, self.device), output_size=self.size)

    @cached_property
    def positions(self) -> Tensor:
        """[T] int64, where each local token lies among all tokens of all sequences."""
        begins = [0, *accumulate(self.lengths)]
        return self._running([begins[s] + start for s, start, _, _ in self.pieces])

    @cached_property
    def within(self) -> Tensor:
        """[T] int64, where each local token lies in its own response."""
        return self._running([start for _, start, _, _ in self.pieces])

    @cached_property
    def mask(self) -> Tensor:
        """[T] bool, the response mask of the local tokens."""
        if self.is_whole:
            return self.full_mask
        cuts = self._cuts()
        if min(cuts) < 0:
            return self.full_mask.index_select(0, self.positions)
        return torch.cat(self.full_mask.split(cuts)[1::2] or [self.full_mask[:0]])

    def _cuts(self) -> list[int]:
        """How many tokens of all sequences lie before each piece, in it, and after the last; negative where
        pieces are not in order."""
        begins = list(accumulate(self.lengths, initial=0))
        cuts, at = [], 0
        for sequence, start, stop, _ in self.pieces:
            cuts += (begins[sequence] + start - at, stop - start)
            at = begins[sequence] + stop
        return [*cuts, begins[-1] - at]

    @cached_property
    def turn_ids(self) -> Tensor:
        """[T] int64, the turn of each local token, from 1: a maximal run of response mask 1 in one sequence.

        A token outside every turn carries the id of the turn before it, 0 for none; no reduction counts it.
        """
        begins = [b for b, n in zip(accumulate(self.lengths, initial=0), self.lengths, strict=False) if n]
        before = self.full_mask.roll(1).index_fill_(0, host_ints(begins, self.device), False)
        ids = (self.full_mask > before).cumsum(0)
        return ids if self.is_whole else ids.index_select(0, self.positions)

    @cached_property
    def turn_bound(self) -> int:
        """U, an upper bound of the ids of turns and one more, that needs no look at the device."""
        return 1 + sum((n + 1) // 2 for n in self.lengths)

    def zeroed(self, values: Tensor) -> Tensor:
        """[T] -> [T] with 0 at masked tokens, which may hold NaN: selected away, never multiplied."""
        return torch.where(self.mask, values, 0)

    def sum_shares(self, values: Sequence[Tensor]) -> Tensor:
        """K tensors [T], 0 at masked tokens -> [S, K] float64, this rank's share of the sums over each
        sequence.

        Two levels: blocks of 32 tokens are added in the values' own dtype, the blocks in float64. With u the
        unit roundoff of that dtype, |error| <= 31 u sum|x| + (number of blocks) 2^-53 sum|x|: in float32
        1.9e-6 of sum|x| at any length, where one sequential float32 sum of 128k tokens guarantees 7.9e-3. The
        bound holds for what numpy adds, too.
        """
        return self.grid.totals([self.grid.partial(v) for v in values]).t()

    def max_shares(self, values: Tensor) -> Tensor:
        """[T], -inf at masked tokens -> [S, slots] float64: the maximum of each part of a sequence.

        0 for the parts that other ranks hold, so that adding up over the ranks gives the whole table.
        """
        lengths = [stop - start for _, start, stop, _ in self.pieces]
        offsets = host_ints([0, *accumulate(lengths)], self.device)
        highest = torch.segment_reduce(
            values, "max", offsets=offsets, unsafe=True, initial=-torch.inf
        ).double()
        if self.is_whole:
            return highest.view(self.count, 1)
        table = highest.new_zeros(self.count * self.slots).index_copy(0, self.piece_slots, highest)
        return table.view(self.count, self.slots)

    def turn_sum_shares(self, values: Tensor) -> Tensor:
        """[T], 0 at masked tokens -> [U] float64, this rank's share of the sums over each turn."""
        counted = values.double()
        return counted.new_zeros(self.turn_bound).index_add(0, self.turn_ids, counted)

    def turn_max_shares(self, values: Tensor) -> Tensor:
        """[T] -> [U, slots, 2] float64: the maximum of each part of a turn, and 1 where this rank holds any
        of it."""
        counted = torch.where(self.mask, values, -torch.inf).double()
        index = self.turn_ids * self.slots + self.token_slots
        table = counted.new_full((self.turn_bound * self.slots,), -torch.inf)
        table = table.scatter_reduce(0, index, counted, "amax").view(self.turn_bound, self.slots)
        held = table > -torch.inf
        return torch.stack([torch.where(held, table, 0), held.double()], 2)

    @cached_property
    def token_slots(self) -> Tensor:
        """[T] int64, the part of its sequence that each local token lies in."""
        slots = host_ints([slot for _, _, _, slot in self.pieces], self.device)
        return self.repeat(slots, [stop - start for _, start, stop, _ in self.pieces])

    def sum(self, values: Tensor) -> Tensor:
        """[T] -> [S] float64, over the response tokens of every rank; see ``sum_shares`` for the error
        bound."""
        return self.all_sum(self.sum_shares([self.zeroed(values)])).squeeze(1)

    def mean(self, values: Tensor) -> Tensor:
        """[T] -> [S] float64; 0 for a sequence without response tokens."""
        table = self.all_sum(self.sum_shares([self.zeroed(values), as_numbers(self.mask, values.dtype)]))
        return table[:, 0] / table[:, 1].clamp_min(1)

    def max(self, values: Tensor) -> Tensor:
        """[T] -> [S] float64; -inf for a sequence without response tokens."""
        return self.all_sum(self.max_shares(torch.where(self.mask, values, -torch.inf))).amax(1)

    def min(self, values: Tensor) -> Tensor:
        """[T] -> [S] float64; inf for a sequence without response tokens."""
        return -self.max(-values)

    def any(self, flags: Tensor) -> Tensor:
        """[T] bool -> [S] bool, whether any response token carries the flag."""
        return self.max(flags.float()) > 0

    def spread(self, values: Tensor) -> Tensor:
        """[S] -> [T], the sequence's value at each of its local tokens."""
        if arrays.is_array(values):
            return arrays.repeated(values, self.grid.numbers)
        return values.index_select(0, self._owners)

    def repeat(self, values: Tensor, lengths: Sequence[int]) -> Tensor:
        """Each value as often as its length says, without asking the device for the total."""
        if arrays.is_array(values):
            return arrays.repeated(values, arrays.integers(lengths))
        return values.repeat_interleave(host_ints(lengths, self.device), output_size=sum(lengths))

    @cached_property
    def _owners(self) -> Tensor:
        """[T] int32, ``ids`` in half the memory."""
        lengths = self.parcel.take("lengths")
        return torch.repeat_interleave(lengths, output_size=self.size)

    @cached_property
    def grid(self) -> Grid:
        """Where the local tokens of each sequence lie among blocks."""
        return Grid(self.local_lengths, self.device)

    @property
    def parcel(self) -> Parcel:
        """What the device is told of this call at once."""
        return self.grid.parcel

    def numbers(self, numbers: Numbers, like: Tensor) -> Tensor:
        """Numbers of the host beside another tensor; those that the parcel expects cost a device nothing."""
        if is_traced(like) or like.is_cpu:
            return host_numbers(numbers, like)
        self.parcel.expect(numbers, like.dtype)
        return self.parcel.take((numbers, like.dtype))

    @cached_property
    def piece_slots(self) -> Tensor:
        """[P] int64, the place of each piece among all parts of all sequences."""
        return host_ints([s * self.slots + slot for s, _, _, slot in self.pieces], self.device)

    def _running(self, begins: Sequence[int]) -> Tensor:
        """[T] int64, numbers that count up through each piece from where it begins."""
        lengths = [stop - start for _, start, stop, _ in self.pieces]
        packed = accumulate(lengths, initial=0)
        shifts = [begin - at for begin, at in zip(begins, packed, strict=False)]
        shift = self.repeat(host_ints(shifts, self.device), lengths)
        return shift + torch.arange(self.size, device=self.device)
