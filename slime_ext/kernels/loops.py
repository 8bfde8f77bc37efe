"""The compiled backend on a CPU: two passes over the tokens in C++, written from the correction's steps."""

from __future__ import annotations

import ctypes
import threading
import warnings
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from slime_ext.correction import Tokens
from slime_ext.kernels.apply import Backend, Work, over_ranks
from slime_ext.kernels.built import BuildError, library
from slime_ext.kernels.cpp_text import ARRAYS, source
from slime_ext.kernels.passes import Named, Parts, TwoPasses, room
from slime_ext.kernels.vectors import Vectors
from slime_ext.ops.runs import pieces
from slime_ext.ops.segments import Segments

SMALLEST = 256  # tokens; below, building costs more than it saves


@dataclass(frozen=True, eq=False)
class Loops(TwoPasses):
    """C++ loops for one correction. Small batches, float64 and machines that cannot build run on numpy."""

    name: str = "compiled"

    def __post_init__(self) -> None:
        self.__dict__.update(_built={}, _lock=threading.Lock())

    def _serves(self, tokens: Tokens, parts: Parts) -> bool:
        read = (self.correction.numerator_of(tokens), tokens.behavior)
        wide = any(values.dtype is torch.float64 for values in read)
        return tokens.segments.size >= SMALLEST and not wide and self._library(parts) is not None

    @cached_property
    def _otherwise(self) -> Backend:
        return Vectors(self.correction)

    @cached_property
    def _keeps_finite(self) -> bool:
        """Whether every token that has a log-ratio is kept."""
        return not any(step.rejects or step.unit != "token" for step in self.correction.steps)

    def _weights(self, loss: Tensor) -> bool:
        return loss.dtype is torch.float32

    def _library(self, parts: Parts) -> ctypes.CDLL | None:
        with self._lock:
            if parts not in self._built:
                self._built[parts] = _library(source(self.correction, self._needs(parts), parts))
            return self._built[parts]

    def _run(self, work: Work, parts: Parts) -> Named:
        tokens, segments, needs = work.tokens, work.tokens.segments, self._needs(parts)
        kernels = self._library(parts)
        arrays = self._read(tokens) | _pieces(segments)
        sizes = (arrays["bounds"].numel() - 1, segments.size, segments.count, int(work.first))
        finites = work.plan.keep is not None or not self._keeps_finite
        arrays |= self._settled(tokens, work.plan) | room(work, parts, torch.float32, finites=finites)
        if parts.loss:
            arrays["losses"] = _single(work.host_loss)
        arrays["table"] = table = torch.zeros(len(needs), segments.count, dtype=torch.float64)
        given = _addresses(arrays), (ctypes.c_int64 * len(sizes))(*sizes)
        if needs:
            kernels.statistics(*given)
            arrays["table"] = over_ranks(table, segments.all_sum)
        if arrays["table"] is not table:
            given = _addresses(arrays), given[1]
        kernels.correct(*given)
        return arrays

    def _read(self, tokens: Tokens) -> Named:
        read = {
            "numerators": _single(self.correction.numerator_of(tokens)),
            "behaviors": _single(tokens.behavior),
        }
        if any(step.reads_advantages for step in self.correction.steps):
            read["advantages"] = _single(tokens.advantages)
        return read | {"masks": tokens.segments.mask.contiguous()}


def _library(text: str) -> ctypes.CDLL | None:
    try:
        return library(text)
    except BuildError as error:
        warnings.warn(f"{error}; this correction stays eager", RuntimeWarning, stacklevel=2)
        return None


def _single(values: Tensor) -> Tensor:
    """Float32 without gaps; only its address is used."""
    if values.dtype is torch.float32 and values.is_contiguous():
        return values
    return values.detach().to(torch.float32).contiguous()


def _pieces(segments: Segments) -> Named:
    """Where what this rank holds of its sequences begins and ends."""
    sequences, starts, stops = (column.reshape(-1) for column in pieces(segments))
    bounds = np.zeros(len(sequences) + 1, dtype=np.int64)
    np.cumsum(stops - starts, out=bounds[1:])
    numbers = {"bounds": bounds}
    if not segments.is_whole:
        numbers |= {"owners": sequences, "starts": starts}
    return {name: torch.from_numpy(np.ascontiguousarray(n)) for name, n in numbers.items()}


def _addresses(arrays: Named) -> ctypes.Array:
    """Of every array in the order in which the loops unpack them; none for what is not there."""
    addresses = [arrays[name].data_ptr() if name in arrays else None for name in ARRAYS]
    return (ctypes.c_void_p * len(ARRAYS))(*addresses)
