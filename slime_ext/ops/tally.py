"""Sums per bin of tokens that lie in any order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime_ext.ops.segments import is_traced

SLICE = 1 << 18  # tokens whose 0-1 matrix is there at once

LIBRARY = torch.library.Library("slime_ext", "FRAGMENT")
LIBRARY.define("tally(Tensor index, Tensor[] rows, int bins) -> Tensor")
LIBRARY.define("count(Tensor index, int bins) -> Tensor")


def tally(index: Tensor, rows: Tensor | Sequence[Tensor], bins: int) -> Tensor:
    """K rows [T] (a table unless they are traced) summed by bin -> [K, bins] float64.

    An operation of its own in a graph: a compiler's loop with an addition at random would do all else that
    it does one token at a time.

    Args:
        index: [T] int64 from 0 to bins - 1.
    """
    if is_traced(index):
        return torch.ops.slime_ext.tally(index, list(rows), bins)
    table = torch.zeros(len(rows), bins, dtype=torch.float64, device=index.device)
    return table.scatter_add_(1, index.expand(len(rows), -1), rows.double())


def count(index: Tensor, bins: int, one: Tensor | None = None) -> Tensor:
    """[bins] whole numbers, how many tokens lie in each: int64, on a device float64.

    Args:
        index: [T] integers from 0 to bins - 1.
        one: [1] 1 in float64, where a device has it already.
    """
    return torch.ops.slime_ext.count(index, bins) if is_traced(index) else _count(index, bins, one)


def product(places: Tensor, rows: Tensor, bins: Tensor) -> Tensor:
    """K rows [T] summed by the bins of each of C curves -> [C, B, K] float64, without additions whose order
    is left to the device: a product with a 0-1 matrix, slice by slice.

    Args:
        places: [C, T] integers; what is none of the bins is in no bin.
        bins: [B] integers.
    """
    wide = rows.new_zeros(len(places) * len(bins), len(rows), dtype=torch.float64)
    for start in range(0, rows.shape[1], SLICE):
        of_slice = places[:, None, start : start + SLICE]
        inside = wide.new_empty(len(places), len(bins), of_slice.shape[2])
        torch.eq(of_slice, bins[:, None], out=inside)
        wide.addmm_(inside.flatten(0, 1), rows[:, start : start + SLICE].t().double())
    return wide.view(len(places), len(bins), len(rows))


def _tally(index: Tensor, rows: list[Tensor], bins: int) -> Tensor:
    table = torch.zeros(len(rows), bins, dtype=torch.float64, device=index.device)
    for sums, row in zip(table, rows, strict=True):
        sums.scatter_add_(0, index, row.double())
    return table


def _count(index: Tensor, bins: int, one: Tensor | None = None) -> Tensor:
    if index.device.type == "cpu":
        return torch.bincount(index, minlength=bins)  # elsewhere it waits for the device
    if one is None:
        one = torch.ones(1, dtype=_counted_in(index), device=index.device)
    return one.new_zeros(bins).index_add_(0, index.int(), one.expand(index.shape))


def _counted_in(index: Tensor) -> torch.dtype:
    """Devices add in what the sums are joined in."""
    return torch.int64 if index.device.type == "cpu" else torch.float64


LIBRARY.impl("tally", _tally, "CompositeExplicitAutograd")
LIBRARY.impl("count", _count, "CompositeExplicitAutograd")
torch.library.register_fake(
    "slime_ext::tally",
    lambda index, rows, bins: index.new_empty((len(rows), bins), dtype=torch.float64),
    lib=LIBRARY,
)
torch.library.register_fake(
    "slime_ext::count", lambda index, bins: index.new_empty((bins,), dtype=_counted_in(index)), lib=LIBRARY
)
