"""Products of bfloat16 matrices on a CPU that has no instructions for them.

oneDNN emulates these there, at 50 GFLOPS on two cores that reach 250 in float32: for a step of the language
model `slime-ext train` took 68 s, and takes 30 with this. A CPU that has the instructions accumulates in
float32, too.
"""

from __future__ import annotations

import functools
import warnings
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a stand-in is registered in every process, before anything imports torch
    from torch import Tensor

FEW, OUTPUTS = 64, 512  # tokens of a step of sampling; outputs of a layer whose weights stay in the cache
_kept: list[object] = []  # a kernel lives as long as its library object


def multiply_in_float32(torch: ModuleType) -> None:
    """Replaces the kernel of `aten::mm`, which linear layers and their gradients call, if it is emulated."""
    if is_emulated():
        replace_kernel(torch)


@functools.cache
def is_emulated() -> bool:
    """Whether this CPU has no instruction for bfloat16."""
    import torch

    return not any("bf16" in name and has for name, has in torch.cpu.get_capabilities().items())


def widened(values: Tensor) -> Tensor:
    """bfloat16 values as float32 if the CPU emulates bfloat16: attention's gradient takes a tenth."""
    import torch

    return values.float() if values.dtype == torch.bfloat16 and is_emulated() else values


def replace_kernel(torch: ModuleType) -> None:
    """Has `aten::mm` multiply in float32 what is bfloat16: [n, k] and [k, m] to [n, m].

    For the few tokens of a step of sampling, copying a layer's weights to float32 takes longer than the
    product. Copied in parts they stay in the cache: 16 tokens take 0.6 of the time, to the same bits.
    """

    def mm(left: Tensor, right: Tensor) -> Tensor:
        is_narrow = left.dtype == right.dtype == torch.bfloat16
        if is_narrow and left.shape[0] <= FEW and right.shape[1] > OUTPUTS and right.t().is_contiguous():
            return torch.cat([mm(left, part) for part in right.split(OUTPUTS, 1)], 1)
        if is_narrow:
            left, right = left.float(), right.float()
        out = left.new_empty(left.shape[0], right.shape[1])
        torch.mm(left, right, out=out)  # an overload of its own, whose kernel is still torch's
        return out.bfloat16() if is_narrow else out

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # that a kernel is replaced
        library.impl("mm", mm, "CPU", allow_override=True)
    _kept.append(library)
