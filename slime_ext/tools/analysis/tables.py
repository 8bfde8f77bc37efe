"""Sums tokens into tables, which add up over rollouts and processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import Any, ClassVar, dataclass_transform

import numpy
import torch
from torch import Tensor

MOST_BITS = 63  # of an int64 that is not negative
LONG_RUNS = 4  # mean tokens per run from which it is faster to sum the runs first


class Rows(tuple[Tensor, ...]):
    """K rows [N] that are summed into one table.

    Both parts of a complex number are added in the time of one real number.

    Attributes:
        pairs: numbers of two rows -> both as the parts of complex numbers, [N] complex128.
    """

    pairs: Mapping[tuple[int, int], Tensor]

    @classmethod
    def of(cls, rows: Iterable[Tensor], pairs: Mapping[tuple[int, int], Tensor]) -> Rows:
        """Returns rows, some of which are pairs as well."""
        made = cls(rows)
        made.pairs = pairs
        return made


def zeros(*size: int) -> Tensor:
    """Returns an empty table of sums, float64."""
    return torch.zeros(*size, dtype=torch.float64)


@dataclass_transform(eq_default=False, field_specifiers=(field,))
class Additive:
    """Makes each subclass a dataclass whose fields add up.

    Tables and counters add up entry by entry, mappings key by key. Lists are joined. Nobody compares or
    prints such sums, and without these methods a class is made in half the time.

    Attributes:
        takes_joined: whether ``add`` may get several small rollouts as one (``records.join``).
    """

    takes_joined: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        dataclass(eq=False, repr=False)(cls)

    def merge(self, other: Any) -> None:
        """Adds the fields of another instance."""
        for name in (one.name for one in fields(self)):
            setattr(self, name, _added(getattr(self, name), getattr(other, name)))


def _added(value: Any, more: Any) -> Any:
    if isinstance(value, Tensor):
        return sum_of(value, more)
    if isinstance(value, Counter):
        value.update(more)
        return value
    if isinstance(value, dict):
        return {key: _added(one, more[key]) for key, one in value.items()}
    if hasattr(value, "merge"):
        value.merge(more)
        return value
    return value + more


def sum_of(a: Tensor, b: Tensor) -> Tensor:
    """Returns the sum of two tables; one may have more rows than the other."""
    more, less = (a, b) if len(a) >= len(b) else (b, a)
    out = more.double() + 0.0  # a new table in one pass; 0 for -0
    out[: len(less)].add_(less)
    return out


def mean_of(total: float, count: float) -> float | None:
    """Returns a sum divided by its count; None if the count is 0."""
    return total / count if count else None


def count_true(flags: Tensor) -> int:
    """Returns how many flags are true, in a fifth of the time of ``Tensor.count_nonzero``."""
    return int(numpy.count_nonzero(flags.numpy()))


def is_finite(values: Tensor) -> Tensor:
    """Returns where values are finite, in a tenth of the time of ``Tensor.isfinite``."""
    return torch.from_numpy(numpy.isfinite(values.numpy()))


def is_above(values: Tensor, limit: float) -> Tensor:
    """Returns where values are above a limit. PyTorch does not vectorise >, and takes ten times as long."""
    return torch.from_numpy(values.numpy() > limit)


def is_below(values: Tensor, limit: float) -> Tensor:
    """Returns where values are below a limit; see ``is_above``."""
    return torch.from_numpy(values.numpy() < limit)


def are_equal(values: Tensor, others: Tensor | float) -> Tensor:
    """Returns where values are equal; see ``is_above``."""
    return torch.from_numpy(values.numpy() == (others.numpy() if isinstance(others, Tensor) else others))


def any_true(flags: Tensor) -> bool:
    """Returns whether a flag is true, without a pass over all if an early one is."""
    return bool(flags.numpy().any())


def selection(values: Tensor, flags: Tensor) -> Tensor:
    """Returns the values [N] whose flags are true. If most are, it takes a seventh of the time of ``[]``."""
    return torch.from_numpy(values.numpy()[flags.numpy()])


def run_begins(*keys: Tensor) -> Tensor:
    """Returns where the runs of equal entries in tensors [N] begin, [runs] int64."""
    return torch.from_numpy(numpy.flatnonzero(_is_begin(*keys)))


def _is_begin(*keys: Tensor) -> numpy.ndarray:
    """Returns whether a run of equal entries begins at each place, [N] bool."""
    first = keys[0].numpy()
    is_begin = numpy.empty(len(first), dtype=bool)
    is_begin[:1] = True
    numpy.not_equal(first[1:], first[:-1], out=is_begin[1:])
    for key in keys[1:]:
        numbers = key.numpy()
        is_begin[1:] |= numbers[1:] != numbers[:-1]
    return is_begin


def earlier(keys: Tensor) -> Tensor:
    """Returns how many earlier entries are equal to each entry, [N].

    >>> earlier(torch.tensor([7, 5, 7, 7])).tolist()
    [0, 0, 1, 2]
    """
    keys, order = in_order(keys)
    begins = run_begins(keys).numpy()
    first = numpy.repeat(begins, numpy.diff(begins, append=len(keys)))  # where the run of each place begins
    counts = numpy.empty_like(first)
    counts[order.numpy()] = numpy.arange(len(keys)) - first
    return torch.from_numpy(counts)


def numbered(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the different values in rising order, and the number of each entry's value, [N].

    Equal entries, such as the versions of one rollout, take a tenth of the time of ``Tensor.unique``.
    """
    numbers = values.numpy()
    if len(numbers) and (numbers == numbers[0]).all():
        return values[:1], torch.zeros(len(numbers), dtype=torch.int64)
    return values.unique(return_inverse=True)


def in_order(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Returns integers [N] in rising order, and their places before, where equal ones keep their order.

    If a key and its place fit into 63 bits, both are sorted as one number, in a third of the time.
    """
    count = len(keys)
    if not count:
        return keys, keys
    low, high = int(keys.numpy().min()), int(keys.numpy().max())
    bits = (count - 1).bit_length()
    if (high - low).bit_length() + bits > MOST_BITS:
        order = keys.argsort(stable=True)
        return keys[order], order
    both = keys.numpy().astype(numpy.int64)
    both -= low
    both <<= bits
    both |= numpy.arange(count)
    both.sort()
    order = both & ((1 << bits) - 1)
    both >>= bits
    both += low
    return torch.from_numpy(both), torch.from_numpy(order)


def run_sums(rows: Sequence[Tensor] | Tensor, begins: Tensor) -> Tensor:
    """Returns the sums of K rows [N] over the runs that begin at ``begins``, [K, runs]."""
    at = begins.numpy()
    sums = numpy.empty((len(rows), len(at)))
    for row, of_row in zip(rows, sums, strict=True) if len(at) else ():
        numpy.add.reduceat(row.numpy(), at, out=of_row)
    return torch.from_numpy(sums)


def bins_of(values: Tensor, size: int) -> Tensor:
    """Returns the bins of values, [N] int32, from 0 to ``size`` - 1.

    It is ``size`` for NaN, which ``tabulated`` skips.
    """
    return values.clamp(0, size - 1).nan_to_num_(size).int()


def tabulated(index: Tensor, rows: Sequence[Tensor] | Tensor, size: int) -> Tensor:
    """Returns the sums of K rows [N] by the index [N] of each column, [size, K].

    Columns with the index ``size`` count nowhere. Neighbours often have the same index, so their sums are
    computed first.
    """
    is_begin = _is_begin(index)
    if LONG_RUNS * numpy.count_nonzero(is_begin) < len(is_begin):
        index, rows = _sums_that_count(index, rows, numpy.flatnonzero(is_begin), size)
    return torch.from_numpy(numpy.ascontiguousarray(_scattered(index.long(), rows, size + 1)[:, :size].T))


def _sums_that_count(
    index: Tensor, rows: Sequence[Tensor] | Tensor, begins: numpy.ndarray, size: int
) -> tuple[Tensor, Tensor]:
    """Returns index and sums of the runs that begin at ``begins``, with or without those that count nowhere.

    If these hold most columns, such as all but the first tokens of responses, only the others are read.
    """
    of_run = index.numpy()[begins]
    counts = of_run != size
    if not counts.all():
        kept = numpy.diff(begins, append=len(index))[counts]
        if LONG_RUNS * kept.sum() < len(index):
            firsts = kept.cumsum() - kept
            at = numpy.repeat(begins[counts] - firsts, kept) + numpy.arange(kept.sum())
            rows, begins, of_run = [row[torch.from_numpy(at)] for row in rows], firsts, of_run[counts]
    return torch.from_numpy(of_run), run_sums(rows, torch.from_numpy(begins))


def tabulated_apart(
    index: Tensor, rows: Sequence[Tensor] | Tensor, size: int, counts: Sequence[int]
) -> Tensor:
    """Returns ``tabulated`` of each stretch of columns, bit by bit, [stretches, size, K].

    Args:
        counts: number of columns of each stretch; all but the last may be 0 as well.
    """
    changes = numpy.not_equal(index[1:].numpy(), index[:-1].numpy())
    bounds = list(pairwise(accumulate(counts, initial=0)))
    has_runs = {
        LONG_RUNS * (1 + numpy.count_nonzero(changes[begin : end - 1])) < end - begin
        for begin, end in bounds
        if end > begin
    }
    if len(has_runs) > 1:  # their sums are computed in different orders
        return torch.stack([tabulated(index[b:e], [row[b:e] for row in rows], size) for b, e in bounds])
    index = torch.add(index.long(), _stretches(tuple(counts)), alpha=size + 1)
    if True in has_runs:
        begins = run_begins(index)
        index, rows = index[begins], run_sums(rows, begins)
    sums = torch.from_numpy(_scattered(index, rows, len(counts) * (size + 1)))
    return sums.view(len(rows), len(counts), size + 1)[..., :size].permute(1, 2, 0)


@lru_cache(4)  # tokens and samples of the rollouts that are being read
def _stretches(counts: tuple[int, ...]) -> Tensor:
    """Returns the number of the stretch of each column, from the columns of each stretch."""
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


def _scattered(index: Tensor, rows: Sequence[Tensor] | Tensor, size: int) -> numpy.ndarray:
    """Returns the sums of K rows [N] by the index [N] of each column, [K, size].

    The table is an array, because assigning a row of a small one takes a tenth of the time of a tensor's.
    """
    if isinstance(rows, Tensor):
        return zeros(len(rows), size).scatter_add_(1, index.expand(len(rows), -1), rows.double()).numpy()
    table = numpy.zeros((len(rows), size))
    pairs = rows.pairs if isinstance(rows, Rows) else {}
    for (first, second), pair in pairs.items():
        sums = torch.zeros(size, dtype=torch.complex128).scatter_add_(0, index, pair).numpy()
        table[first], table[second] = sums.real, sums.imag
    alone = set(range(len(rows))).difference(chain.from_iterable(pairs))
    for i in alone:  # scatter_add_ takes half the time of bincount
        torch.from_numpy(table[i]).scatter_add_(0, index, rows[i].double())
    return table
