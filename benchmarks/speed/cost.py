"""Measures time, operations, waits for the device and bytes of one call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VIEWS = ("detach", "view", "select", "split", "scalar_tensor", "lift_fresh", "squeeze", "unsqueeze", "slice")
VIEWS += ("expand", "alias", "as_strided", "empty", "new_empty", "t.", "transpose", "unbind", "promote_types")
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal.", "is_nonzero", "index.Tensor_bool")

Name = TypeVar("Name", bound=Hashable)


class Cost(NamedTuple):
    """The cost of one call, counted on the CPU: would-be kernel launches and waits."""

    operations: int
    waits: int
    megabytes: float  # read and written by the operations
    peak: float  # megabytes of new tensors alive at once


class Counting(TorchDispatchMode):
    """Counts dispatched operations, without views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.waits, self.bytes, self.peak = 0, 0, 0, 0
        self._alive: dict[int, tuple[Callable[[], bool], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.")
        self.waits += name.startswith(WAITS) or (name.startswith("index.") and _by_flags(args))
        read, made = _tensors((args, kwargs)), _tensors(out)
        if not name.startswith(VIEWS):
            self.operations += 1
            self.bytes += sum(t.numel() * t.element_size() for t in (*read, *made))
        known = {t.untyped_storage().data_ptr() for t in read}
        for storage in (t.untyped_storage() for t in made if t.untyped_storage().data_ptr() not in known):
            weak = StorageWeakRef(storage)
            self._remember(storage.data_ptr(), storage.nbytes(), lambda weak=weak: not weak.expired())
        return out

    def _remember(self, at: int, size: int, is_there: Callable[[], bool]) -> None:
        """Keeps account of memory that this call allocated and still holds."""
        self._alive = {place: held for place, held in self._alive.items() if held[0]()}
        self._alive.setdefault(at, (is_there, size))
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _by_flags(args: Any) -> bool:
    return any(isinstance(t, torch.Tensor) and t.dtype is torch.bool for t in tree_leaves(args[1:]))


def count(body: Callable[[], Any]) -> Cost:
    """Returns the cost of a call that runs operation by operation."""
    with Counting() as counting:
        body()
    return Cost(counting.operations, counting.waits, counting.bytes / 1e6, counting.peak / 1e6)


class Dispatches(TorchDispatchMode):
    """Counts everything that PyTorch dispatches.

    On a few tokens a view or an allocation costs about as much as an operation that computes. Under a
    dispatch mode a view of another dtype is followed by a ``detach``, which PyTorch dispatches for the mode
    alone (its profiler shows none). That one is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count, self.is_after_view = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (self.is_after_view and func is torch.ops.aten.detach.default)
        self.is_after_view = func is torch.ops.aten.view.dtype
        return func(*args, **(kwargs or {}))


def dispatched(body: Callable[[], Any]) -> int:
    """Returns how many operations a call dispatches, after a first call that fills all caches."""
    body()
    with Dispatches() as dispatches:
        body()
    return dispatches.count


def minima(bodies: Mapping[Name, Callable[[], Any]], repeat: int) -> dict[Name, float]:
    """Returns the fastest call of each body, in seconds. Calls are interleaved.

    We take the minimum, because on a busy machine it repeats best.
    """
    fastest = dict.fromkeys(bodies, float("inf"))
    for _ in range(repeat):
        for name, body in bodies.items():
            begin = time.perf_counter()
            body()
            fastest[name] = min(fastest[name], time.perf_counter() - begin)
    return fastest


def medians(bodies: Mapping[Name, Callable[[], Any]], repeat: int, slow_ms: float = 250) -> dict[Name, float]:
    """Returns the median milliseconds of processor time of each body.

    Calls are interleaved, and every second round runs in reverse order. A body that takes longer than
    ``slow_ms`` runs only four times.
    """
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
