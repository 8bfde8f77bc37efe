"""What the host knows, on a device, without waiting for it."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

WORD = 8  # bytes, of which every dtype that is sent takes a part
MANY = 256  # integers, from which a buffer is faster than torch.tensor
NUMPY = {torch.float32: np.float32, torch.float64: np.float64}
Numbers = float | tuple[float, ...] | tuple[tuple[float, ...], ...]


def host_numbers(numbers: Numbers, like: Tensor) -> Tensor:
    """Numbers in the dtype of another tensor of the CPU, made once, or of a graph, which has constants of its
    own; not to be written to. What a device needs goes there in a ``Parcel``, again in every call: a host may
    drop what a device holds."""
    if type(like) is not Tensor:
        return torch.tensor(numbers, dtype=like.dtype, device=like.device)
    return _on_host(numbers, like.dtype)


@functools.lru_cache(maxsize=256)
def _on_host(numbers: Numbers, dtype: torch.dtype) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


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


@dataclass(frozen=True)
class Parcel:
    """Numbers by name, of which those that wait go in one copy as soon as any is asked for."""

    device: torch.device
    _waiting: dict[Hashable, np.ndarray] = field(default_factory=dict)
    _there: dict[Hashable, Tensor] = field(default_factory=dict)

    def add(self, name: Hashable, values: Callable[[], np.ndarray]) -> None:
        """Has [N] numbers wait for the next copy; nothing where the name is known."""
        if name not in self._there and name not in self._waiting:
            self._waiting[name] = values()

    def expect(self, numbers: Numbers, dtype: torch.dtype) -> None:
        """Has numbers wait under themselves and their dtype."""
        self.add((numbers, dtype), lambda: np.array(numbers, NUMPY[dtype]))

    def take(self, name: Hashable) -> Tensor:
        """[N] on the device, of the dtype in which they were added; not to be written to."""
        if name not in self._there:
            self._send()
        return self._there[name]

    def _send(self) -> None:
        every = {name: values.view(np.uint8) for name, values in self._waiting.items()}
        starts = accumulate((-(-len(values) // WORD) * WORD for values in every.values()), initial=0)
        spans = [slice(start, start + len(v)) for start, v in zip(starts, every.values(), strict=False)]
        together = np.zeros(spans[-1].stop + 1, np.uint8)  # of an empty array no part has another dtype
        for span, values in zip(spans, every.values(), strict=True):
            together[span] = values
        sent = host_ints(together, self.device)
        for span, (name, values) in zip(spans, self._waiting.items(), strict=True):
            self._there[name] = sent[span].view(torch.from_numpy(values).dtype)
        self._waiting.clear()
