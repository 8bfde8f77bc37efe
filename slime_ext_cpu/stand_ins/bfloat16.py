"""Computes products and attention of bfloat16 tensors in float32, and rounds the results to bfloat16.

On a CPU without bfloat16 instructions torch emulates them: a core of a Xeon that is limited to AVX2 does 12
GFLOPS in bfloat16, and 78 in float32. The numbers are the same up to the order of the sums, because a CPU
with the instructions accumulates in float32, too. Even a CPU with the instructions can be faster without
them: the same core with AVX512_BF16, which is not AMX, does 80 GFLOPS in bfloat16 and 150 in float32.
SLIME_EXT_BFLOAT16=float32 asks for float32 there.
"""

from __future__ import annotations

import functools
import os
import warnings
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a stand-in is registered in every process, before anything imports torch
    from torch import Tensor

# Most tokens of a step of sampling; number of a layer's outputs whose weights fit into the cache.
FEW, OUTPUTS = 64, 512
VARIABLE = "SLIME_EXT_BFLOAT16"  # the type in which a run computes with bfloat16 tensors
TYPES = ("float32",)
_kept: list[object] = []  # keeps the library object alive, because its kernel ends with it


def multiply_in_float32(torch: ModuleType) -> None:
    """Replaces the kernel of `aten::mm` if this run computes in float32.

    Linear layers and their gradients call this kernel.
    """
    if is_widened():
        replace_kernel(torch)


@functools.cache
def is_widened() -> bool:
    """Returns whether this run computes in float32: on request, or without instructions for bfloat16."""
    import torch

    if os.environ.get(VARIABLE) in TYPES:
        return True
    return not any("bf16" in name and has for name, has in torch.cpu.get_capabilities().items())


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
