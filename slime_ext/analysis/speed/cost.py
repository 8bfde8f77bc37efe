"""Time, operations, waits for the device and bytes of one call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slime_ext.ops import arrays

VIEWS = ("detach", "view", "select", "split", "scalar_tensor", "lift_fresh", "squeeze", "unsqueeze", "slice")
VIEWS += ("expand", "alias", "as_strided", "empty", "new_empty", "t.", "transpose", "unbind", "promote_types")
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal.", "is_nonzero", "index.Tensor_bool")

Name = TypeVar("Name", bound=Hashable)


class Cost(NamedTuple):
    """Of one call, counted on the CPU: what would be a kernel launch each, and what would be a wait."""

    operations: int
    waits: int
    megabytes: float  # read and written by the operations
    peak: float  # megabytes of new tensors alive at once


class Counting(TorchDispatchMode):
    """Counts what is dispatched, and what we have numpy do, views and allocations left out."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.waits, self.bytes, self.peak = 0, 0, 0, 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._numpy: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Counting:
        self._numpy = {name: getattr(arrays, name) for name in arrays.OPERATIONS}
        for name, function in self._numpy.items():
            setattr(arrays, name, self._watched(function, arrays.OPERATIONS[name]))
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        for name, function in self._numpy.items():
            setattr(arrays, name, function)
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.")
        self.waits += name.startswith(WAITS) or (name.startswith("index.") and _by_flags(args))
        given = tree_leaves((args, kwargs or {}))
        self._add(0 if name.startswith(VIEWS) else 1, given, out)
        return out

    def _watched(self, function: Callable[..., Any], operations: int) -> Callable[..., Any]:
        def watched(*given: Any) -> Any:
            out = function(*given)
            self._add(operations, list(given), out)
            return out

        return watched

    def _add(self, operations: int, given: list, out: Any) -> None:
        self.operations += operations
        if operations:
            touched = [t for t in (*given, *tree_leaves(out)) if isinstance(t, torch.Tensor)]
            self.bytes += sum(t.numel() * t.element_size() for t in touched)
        self._remember(out, given)

    def _remember(self, out: Any, given: list) -> None:
        """Keeps account of storages that this call made and that are still there."""
        known = {t.untyped_storage().data_ptr() for t in given if isinstance(t, torch.Tensor)}
        self._alive = {at: held for at, held in self._alive.items() if not held[0].expired()}
        for made in (t.untyped_storage() for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            if made.data_ptr() not in known:
                self._alive[made.data_ptr()] = (StorageWeakRef(made), made.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))


def _by_flags(args: Any) -> bool:
    return any(isinstance(t, torch.Tensor) and t.dtype is torch.bool for t in tree_leaves(args[1:]))


def count(body: Callable[[], Any]) -> Cost:
    """The cost of one call that runs operation by operation."""
    with Counting() as counting:
        body()
    return Cost(counting.operations, counting.waits, counting.bytes / 1e6, counting.peak / 1e6)


def medians(bodies: Mapping[Name, Callable[[], Any]], repeat: int, slow_ms: float = 250) -> dict[Name, float]:
    """Median milliseconds of processor time, interleaved, the order turned every other time; one that takes
    longer than ``slow_ms`` runs four times alone."""
    times: dict[Name, list[float]] = {name: [] for name in bodies}
    for i in range(repeat + 1):
        for name in list(bodies) if i % 2 else list(bodies)[::-1]:
            if i > 3 and statistics.median(times[name]) > slow_ms:
                continue
            begin = time.process_time()
            bodies[name]()
            if i:
                times[name].append((time.process_time() - begin) * 1e3)
    return {name: statistics.median(taken) for name, taken in times.items()}
