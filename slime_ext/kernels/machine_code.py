"""How Triton makes machine code of our kernels: once for all micro-batches, all numbers in registers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

PER_WARP = 128  # lanes: four numbers a thread leave room for them in registers, and for others on a processor


def kernel(function: Callable[..., None]) -> Any:
    """``triton.jit`` for what is launched. By itself Triton would compile another machine code, for seconds
    each time, for every new mix of aligned arrays and of counts divisible by 16."""
    import triton
    import triton.language as tl

    given = inspect.signature(function).parameters.items()
    plain = [name for name, parameter in given if parameter.annotation is not tl.constexpr]
    return triton.jit(function, do_not_specialize=plain)


def options(lanes: int) -> dict[str, int | bool]:
    """How a kernel of so many lanes is compiled. The eager path rounds after every operation; so must a
    comparison here."""
    return {"enable_fp_fusion": False, "num_warps": lanes // PER_WARP}
