"""Packed sequences cut into chunks: one program of a kernel each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from slime_ext.ops.grid import host_ints

FEWEST, MOST = 128, 2048  # tokens of a chunk


@dataclass(frozen=True)
class Chunks:
    """Where chunks lie; none crosses a sequence border.

    A sequence of a million tokens is 512 chunks, thousands of short ones are one each: both fill the chip.
    """

    lanes: int  # of every program, a power of 2
    owners: Tensor  # [C] int64, the sequence of each chunk
    begins: Tensor  # [C] its first token
    sizes: Tensor  # [C] its tokens
    offsets: Tensor  # [S + 1] the first chunk of each sequence

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Chunks:
        """Cuts sequences of the given lengths, host integers."""
        mean = sum(lengths) // max(len(lengths), 1)
        lanes = min(max(1 << max(mean - 1, 0).bit_length(), FEWEST), MOST)
        starts = list(accumulate(lengths, initial=0))
        counts = [max(-(-n // lanes), 1) for n in lengths]  # one without tokens decides what becomes of it
        owners = [s for s, count in enumerate(counts) for _ in range(count)]
        begins = [b for s, n in zip(starts, counts, strict=False) for b in range(s, s + n * lanes, lanes)]
        sizes = [min(lanes, starts[s + 1] - b) for s, b in zip(owners, begins, strict=True)]
        offsets = list(accumulate(counts, initial=0))
        both = host_ints([*owners, *begins, *sizes, *offsets], device)
        return cls(lanes, *both.split([len(owners)] * 3 + [len(offsets)]))

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return self.owners.numel()
