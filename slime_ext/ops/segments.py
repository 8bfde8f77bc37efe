"""Describes packed sequences of different lengths, and adds numbers up over them and over ranks.

``T`` is the number of response tokens that this rank holds, ``S`` the number of sequences, ``U`` the number
of turns. A rank may hold any part of a sequence, or none. Ranks communicate only through ``all_sum``, a SUM
all-reduce over the ranks that share the sequences.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

import torch

from slime_ext.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

AllSum: TypeAlias = (
    "Callable[[Tensor], Tensor]"  # SUM over ranks; it may work in place: see ``require_contiguous``
)
# (sequence, start, stop, number): the response's shard ``number`` holds its tokens start to stop - 1
Shard = tuple[int, int, int, int]


def require_contiguous(values: Tensor) -> None:
    """Raises DataError unless a tensor may go into a collective.

    A collective writes to it in place. In an expanded or overlapping tensor several numbers share memory, and
    gloo then writes beyond its end. A collective reads a transposed tensor in the order of its memory, which
    may differ between ranks.
    """
    if not values.is_contiguous():
        raise DataError(
            f"all_sum: expected a contiguous tensor, got one of shape {list(values.shape)} with strides "
            f"{list(values.stride())}: an all-reduce writes in place; pass values.contiguous()"
        )


def identity(values: Tensor) -> Tensor:
    """Returns its input: the ``all_sum`` of a process that holds every token.

    It refuses what an all-reduce refuses, so a test on one process finds the mistake.
    """
    require_contiguous(values)
    return values


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU tensor to ``device`` without waiting for it."""
    if device.type == "cpu":
        return values
    pinned = values.pin_memory() if device.type == "cuda" else values
    return pinned.to(device, non_blocking=True)


def as_bytes(flags: Tensor) -> Tensor:
    """Views bool as uint8, in the same memory.

    On a CPU, converting bytes to another dtype is seven times as fast as converting bool.
    """
    return flags.view(torch.uint8)


def as_numbers(flags: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts bool to 0 and 1."""
    return as_bytes(flags).to(dtype)


def integers(values: Tensor) -> torch.dtype:
    """Returns the dtype of integers that are as long as a tensor's numbers."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]


def detached(values: Tensor) -> Tensor:
    """Cuts a tensor off its graph.

    Most tensors have none, and on a few tokens a call of ``detach`` takes as long as an addition.
    """
    return values.detach() if values.requires_grad else values


def selected(values: Tensor, flags: Tensor) -> Tensor:
    """Replaces numbers by 0 where a flag is false, also NaN and infinities.

    It multiplies the bits by 0 or 1. On a CPU this takes 0.4 times as long as ``torch.where``, which PyTorch
    does not vectorise. The result has no gradient; numbers that need one go through ``torch.where``.

    Args:
        values: [T], detached, of any type that is not complex.
        flags: [T] bool.

    >>> selected(torch.tensor([1.5, torch.nan, torch.inf]), torch.tensor([True, False, False]))
    tensor([1.5000, 0.0000, 0.0000])
    """
    return (values.view(integers(values)) * flags).view(values.dtype)


def select_(values: Tensor, flags: Tensor) -> Tensor:
    """Does the same as ``selected`` in place, for numbers that nobody else reads."""
    values.view(integers(values)).mul_(flags)
    return values


def chunks(table: Tensor, most: int) -> list[slice]:
    """Cuts the rows of a [T, K] table into slices.

    A slice has at most ``most`` entries, unless a single row has more.
    """
    step = max(1, most // max(table.shape[1], 1))
    return [slice(at, at + step) for at in range(0, len(table), step)]


def host_ints(values: Sequence[int], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copies Python integers to ``device`` without waiting for it; int64 unless ``dtype`` says otherwise."""
    dtype = dtype or torch.int64
    if not values:
        return torch.empty(0, dtype=dtype, device=device)
    # An array: torch.tensor would read the list number by number, half of the time for 512 numbers.
    packed = array("q" if dtype is torch.int64 else "i", values)
    return to_device(torch.frombuffer(packed, dtype=dtype), device)


@dataclass(frozen=True)
class Segments:
    """The packed response tokens of one micro-batch on one rank.

    Args:
        lengths: [S] full response lengths, host integers.
        shards: the shards that this rank holds, in packed order: sequence by sequence, so the shards of one
            sequence are next to each other. None: this rank holds every token.
        full_mask: [sum of lengths] bool, the response mask of all sequences, the same on every rank.
        shards_per_sequence: how many shards the ranks cut a sequence into, by position.
        all_sum: SUM over the ranks that share the sequences.
    """

    lengths: tuple[int, ...]
    shards: tuple[Shard, ...] | None
    full_mask: Tensor
    shards_per_sequence: int = 1
    all_sum: AllSum = field(default=identity, compare=False)

    @classmethod
    def whole(cls, lengths: Sequence[int], mask: Tensor) -> Segments:
        """Builds the segments of one process that holds every token.

        Args:
            mask: [T], nonzero where the behavior policy sampled the token.
        """
        return cls(tuple(lengths), None, mask.to(torch.bool))

    @property
    def count(self) -> int:
        """S, the number of sequences."""
        return len(self.lengths)

    @cached_property
    def local_shards(self) -> tuple[Shard, ...]:
        """The shards of this rank, or whole sequences if it holds every token."""
        return tuple((i, 0, n, 0) for i, n in enumerate(self.lengths)) if self.shards is None else self.shards

    @property
    def local_lengths(self) -> tuple[int, ...]:
        """The number of tokens of each sequence that this rank holds, [S]."""
        return self.lengths if self.shards is None else self._held

    @cached_property
    def _held(self) -> tuple[int, ...]:
        held = [0] * self.count
        for sequence, start, stop, _ in self.local_shards:
            held[sequence] += stop - start
        return tuple(held)

    @cached_property
    def size(self) -> int:
        """T, the number of tokens that this rank holds."""
        return sum(self.local_lengths)

    @cached_property
    def ids(self) -> Tensor:
        """The sequence of each local token, [T] int32."""
        lengths = host_ints(self.local_lengths, self.full_mask.device, torch.int32)
        return torch.repeat_interleave(lengths, output_size=self.size)

    @cached_property
    def positions(self) -> Tensor:
        """The index of each local token among all tokens of all sequences, [T] int64."""
        begins = list(accumulate(self.lengths, initial=0))
        return self._counting_from([begins[i] + start for i, start, _, _ in self.local_shards])

    @cached_property
    def within(self) -> Tensor:
        """The index of each local token in its response, [T] int64."""
        return self._counting_from([start for _, start, _, _ in self.local_shards])

    @property
    def mask(self) -> Tensor:
        """The response mask of the local tokens, [T] bool."""
        return self.full_mask if self.shards is None else self._local_mask

    @cached_property
    def _local_mask(self) -> Tensor:
        return self.full_mask.index_select(0, self.positions)

    @cached_property
    def turn_ids(self) -> Tensor:
        """The turn of each local token, [T] int64, counted from 1.

        A turn is an unbroken run of tokens of one sequence with response mask 1. A token outside every turn
        has the id of the turn before it, or 0 if there is none; no reduction counts such a token.
        """
        begins = [b for b, n in zip(accumulate(self.lengths, initial=0), self.lengths, strict=False) if n]
        before = self.full_mask.roll(1).index_fill(0, host_ints(begins, self.full_mask.device), False)
        ids = (self.full_mask > before).cumsum(0)
        return ids if self.shards is None else ids.index_select(0, self.positions)

    @cached_property
    def turn_bound(self) -> int:
        """U, larger than every turn id.

        It is computed from the lengths, without waiting for the device.
        """
        return 1 + sum((n + 1) // 2 for n in self.lengths)

    def zeroed(self, values: Tensor) -> Tensor:
        """Sets masked tokens to 0: [T] -> [T].

        They are selected, not multiplied by 0, because they may hold NaN.
        """
        return torch.where(self.mask, values, 0)

    def expand(self, values: Tensor) -> Tensor:
        """Gives each local token the value of its sequence: [S] -> [T]."""
        if self.count == 1:  # a copy of one number takes a tenth of a selection
            return values.expand(self.size).contiguous()
        return values.index_select(0, self.ids)

    def expand_to_tokens(self, unit: str, values: Tensor) -> Tensor:
        """Gives each local token the value of its unit: [T], [U] or [S] -> [T]."""
        if unit == "token":
            return values
        return values.index_select(0, self.turn_ids) if unit == "turn" else self.expand(values)

    def local_sums(self, rows: Sequence[Tensor]) -> Tensor:
        """Adds up each row over this rank's part of each sequence.

        In a row of bool, it counts the true values. Every row is added in float64, one sequence at a time. A
        NaN therefore stays in its sequence, and |error| <= (number of tokens) 2^-53 sum|x|: for 128k tokens
        1.5e-11 of sum|x|, where a sequential sum in float32 guarantees only 7.9e-3.

        Args:
            rows: K tensors [T], 0 at masked tokens.

        Returns:
            [K, S] float64.
        """
        # Each row by itself, because a float64 table of all rows takes K times the memory, and because CUDA
        # runs a one-dimensional segment_reduce as a scan. In two dimensions it loops over each segment.
        return torch.stack([self.local_sum(row) for row in rows])

    def local_sum(self, row: Tensor) -> Tensor:
        """Adds up one row as ``local_sums`` does: [T] -> [S] float64."""
        return torch.segment_reduce(row.double(), "sum", offsets=self.bounds, unsafe=True, initial=0)

    @cached_property
    def bounds(self) -> Tensor:
        """The limits of each sequence's local tokens, [S + 1] int64."""
        return host_ints([*accumulate(self.local_lengths, initial=0)], self.full_mask.device)

    def local_maxima(self, values: Tensor) -> Tensor:
        """Finds the maximum of each shard of each sequence.

        Args:
            values: [T], -inf at masked tokens.

        Returns:
            [S, shards_per_sequence] float64. Shards of other ranks are 0, so the sum over ranks is the whole
            table.
        """
        ends = list(accumulate((stop - start for _, start, stop, _ in self.local_shards), initial=0))
        offsets = host_ints(ends, self.full_mask.device)
        highest = torch.segment_reduce(values, "max", offsets=offsets, unsafe=True, initial=-torch.inf)
        shape = (self.count, self.shards_per_sequence)
        table = highest.new_zeros(shape[0] * shape[1], dtype=torch.float64)
        return table.index_copy(0, self.shard_index, highest.double()).view(shape)

    @cached_property
    def shard_index(self) -> Tensor:
        """The index of each local shard among all shards of all sequences, int64."""
        places = [i * self.shards_per_sequence + number for i, _, _, number in self.local_shards]
        return host_ints(places, self.full_mask.device)

    def cells(self, unit: str) -> Tensor:
        """Finds the number of each local token's shard, counted over all turns or all sequences.

        Returns:
            [T] int64.
        """
        ids = self.turn_ids if unit == "turn" else self.ids.long()
        if self.shards is None:
            return ids * self.shards_per_sequence
        lengths = host_ints([stop - start for _, start, stop, _ in self.shards], self.full_mask.device)
        numbers = host_ints([number for _, _, _, number in self.shards], self.full_mask.device)
        return ids * self.shards_per_sequence + numbers.repeat_interleave(lengths, output_size=self.size)

    def local_turn_sums(self, values: Tensor) -> Tensor:
        """Adds up the values over this rank's part of each turn: [T] -> [U] float64.

        Masked tokens must be 0.
        """
        return values.new_zeros(self.turn_bound, dtype=torch.float64).index_add(
            0, self.turn_ids, values.double()
        )

    def local_turn_maxima(self, values: Tensor) -> Tensor:
        """Finds the maximum of each shard of each turn, and marks this rank's shards.

        Args:
            values: [T], -inf at masked tokens.

        Returns:
            [U, shards_per_sequence, 2] float64: the maximum of a shard, then 1. Both numbers are 0 where this
            rank holds no response token of the shard.
        """
        index = self.cells("turn")
        table = values.new_full(
            (self.turn_bound * self.shards_per_sequence,), -torch.inf, dtype=torch.float64
        )
        table = table.scatter_reduce(0, index, values.double(), "amax").view(self.turn_bound, -1)
        held = table != -torch.inf  # a maximum of NaN is held
        # Ranks exchange only SUMs: one rank holds a shard, all others add 0. Because of the flag, a maximum
        # of 0 differs from a shard without tokens.
        return torch.stack([torch.where(held, table, 0), held.double()], 2)

    def sum(self, values: Tensor, unit: str = "sequence") -> Tensor:
        """Adds up the values [T] over each unit's response tokens on all ranks.

        Returns:
            One float64 per unit.
        """
        return self.all_sum(self._local_sums_of(unit, [self.zeroed(values)]))[0]

    def mean(self, values: Tensor, unit: str = "sequence") -> Tensor:
        """Averages the values [T] over each unit's response tokens on all ranks.

        Returns:
            One float64 per unit; 0 for a unit without response tokens.
        """
        rows = [self.zeroed(values), self.mask]
        total, count = self.all_sum(self._local_sums_of(unit, rows))
        return torch.div(total, count.clamp_min(1))

    def max(self, values: Tensor, unit: str = "sequence") -> Tensor:
        """Finds the largest of the values [T] over each unit's response tokens on all ranks.

        Returns:
            One float64 per unit; -inf for a unit without response tokens.
        """
        values = torch.where(self.mask, values, -torch.inf)
        local = self.local_turn_maxima(values) if unit == "turn" else self.local_maxima(values)
        return highest(unit, self.all_sum(local))

    def _local_sums_of(self, unit: str, rows: Sequence[Tensor]) -> Tensor:
        return torch.stack([*map(self.local_turn_sums, rows)]) if unit == "turn" else self.local_sums(rows)

    def _counting_from(self, begins: Sequence[int]) -> Tensor:
        """Numbers the tokens of each local shard, from the given start of the shard: [T] int64."""
        lengths = [stop - start for _, start, stop, _ in self.local_shards]
        ends, device = accumulate(lengths, initial=0), self.full_mask.device
        shifts = host_ints([begin - at for begin, at in zip(begins, ends, strict=False)], device)
        shifts = shifts.repeat_interleave(host_ints(lengths, device), output_size=self.size)
        return shifts + torch.arange(self.size, device=device)


def highest(unit: str, maxima: Tensor) -> Tensor:
    """Finds the maximum of each unit in a table of maxima.

    The table is the sum over ranks of ``local_maxima`` or ``local_turn_maxima``.
    """
    if unit == "turn":
        maxima = torch.where(maxima[..., 1] > 0, maxima[..., 0], -torch.inf)
    return maxima.amax(1)
