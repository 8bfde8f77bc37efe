"""Computes products and attention of bfloat16 tensors in float32, and rounds the results to bfloat16.

On a CPU without bfloat16 instructions torch emulates them: a core of a Xeon that is limited to AVX2 does 12
GFLOPS in bfloat16, and 78 in float32. The numbers are the same up to the order of the sums, because a CPU
with the instructions accumulates in float32, too. SLIME_EXT_BFLOAT16=float32 asks for float32 on any CPU.
Attention is then faster everywhere. Products are faster in float32 on some CPUs with the instructions, too:
the same core with AVX512_BF16, which is not AMX, does 80 GFLOPS in bfloat16 and 150 in float32. On others
they are slower: a core of a Zen 4 does 200 in bfloat16 and 100 in float32. So each process tries both.
"""

from __future__ import annotations

import functools
import os
import time
import warnings
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a stand-in is registered in every process, before anything imports torch
    from collections.abc import Callable

    from torch import Tensor

# Most tokens of a step of sampling; number of a layer's outputs whose weights fit into the cache.
FEW, OUTPUTS = 64, 512
VARIABLE = "SLIME_EXT_BFLOAT16"  # the type in which a run computes with bfloat16 tensors
TYPES = ("float32",)
TRIED, TRIES = (128, 576, 1536), 5  # rows, inputs and outputs of the product that is tried
_kept: list[object] = []  # keeps the library object alive, because its kernel ends with it


def multiply_in_float32(torch: ModuleType) -> None:
    """Replaces the kernel of `aten::mm` if this run computes products in float32.

    Linear layers and their gradients call this kernel.
    """
    if multiplies_in_float32():
        replace_kernel(torch)


@functools.cache
def is_widened() -> bool:
    """Returns whether this run computes in float32: on request, or without instructions for bfloat16."""
    return os.environ.get(VARIABLE) in TYPES or not _has_instructions()


@functools.cache
def multiplies_in_float32() -> bool:
    """Returns whether this run computes products in float32.

    A run in float32 does so, unless the instructions for bfloat16 are faster here.
    """
    return is_widened() and not (_has_instructions() and _is_faster_with_instructions())


def _has_instructions() -> bool:
    import torch

    return any("bf16" in name and has for name, has in torch.cpu.get_capabilities().items())


def _is_faster_with_instructions() -> bool:
    """Tries a product both ways, in some 30 ms.

    The least times count here. ``machine.gflops`` has the mean, which also says what other processes take.
    """
    import torch

    rows, inputs, outputs = TRIED
    left = torch.ones(rows, inputs, dtype=torch.bfloat16)
    right = torch.ones(inputs, outputs, dtype=torch.bfloat16)
    in_bfloat16 = _seconds(lambda: left @ right)
    return in_bfloat16 < _seconds(lambda: (left.float() @ right.float()).bfloat16())


def _seconds(compute: Callable[[], Tensor]) -> float:
    """Returns the least time of several calls, because another process may interrupt some."""
    compute()
    times = []
    for _ in range(TRIES):
        start = time.perf_counter()
        compute()
        times.append(time.perf_counter() - start)
    return min(times)


def widened(values: Tensor) -> Tensor:
    """Converts bfloat16 values to float32 if this run computes in float32.

    The gradient of attention then takes a tenth of the time.
    """
    import torch

    return values.float() if values.dtype == torch.bfloat16 and is_widened() else values


def replace_kernel(torch: ModuleType) -> None:
    """Makes `aten::mm` multiply bfloat16 matrices in float32: [n, k] and [k, m] to [n, m].

    A step of sampling has few tokens, so copying a layer's weights to float32 takes longer than the product.
    If they are copied in parts, each part stays in the cache: 16 tokens take 0.6 of the time, and the result
    has the same bits.
    """

    def mm(left: Tensor, right: Tensor) -> Tensor:
        is_narrow = left.dtype == right.dtype == torch.bfloat16
        if is_narrow and left.shape[0] <= FEW and right.shape[1] > OUTPUTS and right.t().is_contiguous():
            return torch.cat([mm(left, part) for part in right.split(OUTPUTS, 1)], 1)
        if is_narrow:
            left, right = left.float(), right.float()
        out = left.new_empty(left.shape[0], right.shape[1])
        torch.mm(left, right, out=out)  # a separate overload, which still has torch's kernel
        return out.bfloat16() if is_narrow else out

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # torch warns that a kernel is replaced
        library.impl("mm", mm, "CPU", allow_override=True)
    _kept.append(library)
