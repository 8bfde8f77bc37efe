"""Sums over tokens that add up over parts of a rollout, rollouts and processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy
import torch
from torch import Tensor

LONG_RUNS = 4  # tokens; shorter runs are not worth their sums


def zeros(*size: int) -> Tensor:
    """A table of sums, float64."""
    return torch.zeros(*size, dtype=torch.float64)


class Additive:
    """A dataclass whose fields add up: tables and counters entry by entry, mappings key by key, lists one
    after the other."""

    def merge(self, other: Any) -> None:
        """Adds what another one counted."""
        for name in (field.name for field in fields(self)):
            setattr(self, name, _added(getattr(self, name), getattr(other, name)))


def _added(mine: Any, theirs: Any) -> Any:
    if isinstance(mine, Tensor):
        return sum_of(mine, theirs)
    if isinstance(mine, Counter):
        mine.update(theirs)
        return mine
    if isinstance(mine, dict):
        return {key: _added(one, theirs[key]) for key, one in mine.items()}
    if hasattr(mine, "merge"):
        mine.merge(theirs)
        return mine
    return mine + theirs


def sum_of(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two tables, of which one may have more rows."""
    out = zeros(max(len(a), len(b)), *a.shape[1:])
    out[: len(a)] += a
    out[: len(b)] += b
    return out


def run_begins(*keys: Tensor) -> Tensor:
    """Where the runs of equal entries of tensors [N] begin, [runs] int64."""
    changes = torch.ones(len(keys[0]), dtype=torch.bool)
    changes[1:] = torch.stack([key[1:] != key[:-1] for key in keys]).any(0)
    return torch.from_numpy(numpy.flatnonzero(changes.numpy()))


def earlier(keys: Tensor) -> Tensor:
    """[N] how many of the entries before each are equal to it.

    >>> earlier(torch.tensor([7, 5, 7, 7])).tolist()
    [0, 0, 1, 2]
    """
    order = keys.argsort(stable=True)
    begins = run_begins(keys[order])
    found, places = torch.empty_like(order), torch.arange(len(keys))
    lengths = begins.diff(append=begins.new_tensor([len(keys)]))
    found[order] = places - begins.repeat_interleave(lengths)
    return found


def run_sums(rows: Sequence[Tensor] | Tensor, begins: Tensor) -> Tensor:
    """K rows [N] and where runs begin -> the sum over each run, [K, runs]."""
    if not len(begins):
        return zeros(len(rows), 0)
    return torch.stack([torch.from_numpy(numpy.add.reduceat(r.numpy(), begins.numpy())) for r in rows])


def tabulated(index: Tensor, rows: Sequence[Tensor] | Tensor, size: int) -> Tensor:
    """Sums of K rows [N] by the index [N] of each column, [size, K]; an index of ``size`` counts nowhere.

    Neighbours of one index, of which most axes have long runs, are added up first.
    """
    begins = run_begins(index)
    if LONG_RUNS * len(begins) < len(index):
        index, rows = index[begins], run_sums(rows, begins)
    sums = [torch.bincount(index, weights=row, minlength=size + 1)[:size] for row in rows]
    return torch.stack(sums, 1).double()
