"""Weights rounded on their way to the rollout engine: what a quantised sampler multiplies with.

The engine computes in its own type with the rounded values; the trainer keeps the unrounded ones. That is the
mismatch of a quantised sampler without kernels that a CPU does not have. Formats: OCP 8-bit floating point
(https://arxiv.org/abs/2209.05433), blocks of DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
E4M3_MAX = 448.0


def round_weights(named: Iterable[tuple[str, Tensor]], rounding: str) -> list[tuple[str, Tensor]]:
    """The weights with the matrices of the linear layers inside of the blocks (``*_proj.weight``) rounded.

    Embeddings, output layer, norms and routers stay, as quantised checkpoints of Qwen3 leave them.
    """
    function = ROUNDINGS[rounding]
    return [(name, function(w) if name.endswith("_proj.weight") else w) for name, w in named]


def per_channel(weight: Tensor, largest: float, nearest: Callable[[Tensor], Tensor]) -> Tensor:
    """s nearest(w / s) with s = max |w| / largest over each output channel; [out, in] to [out, in]."""
    scale = _scale(weight.float().abs().amax(1, keepdim=True), largest)
    return (nearest(weight.float() / scale) * scale).to(weight.dtype)


def per_block(weight: Tensor, largest: float, nearest: Callable[[Tensor], Tensor]) -> Tensor:
    """s nearest(w / s) with s = max |w| / largest over each block of 128 x 128, smaller at the edges."""
    rows, columns = weight.shape
    padded = F.pad(weight.float().abs(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = _scale(blocks.amax((1, 3)), largest).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    scale = scale[:rows, :columns]
    return (nearest(weight.float() / scale) * scale).to(weight.dtype)


def _scale(largest_weight: Tensor, largest: float) -> Tensor:
    return torch.where(largest_weight > 0, largest_weight / largest, 1.0)


def e4m3(values: Tensor) -> Tensor:
    """The nearest 8-bit float with 4 bits of exponent and 3 of mantissa, ties to even."""
    return values.to(torch.float8_e4m3fn).float()


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8": lambda w: per_channel(w, E4M3_MAX, e4m3),
    "fp8_block": lambda w: per_block(w, E4M3_MAX, e4m3),
    "int8": lambda w: per_channel(w, 127.0, torch.round),
    "int4": lambda w: per_channel(w, 7.0, torch.round),
}
