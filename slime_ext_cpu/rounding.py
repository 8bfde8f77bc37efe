"""Rounds weights on their way to the engine to a quantised sampler's values.

The engine computes in its usual type with the rounded values, and the trainer keeps the unrounded ones. This
gives the mismatch of a quantised sampler without its kernels, which do not exist for CPUs. fp8 is OCP 8-bit
floating point (https://arxiv.org/abs/2209.05433).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

E4M3_MAX = 448.0
INT4_GROUP = 32  # the hosts' size: slime 0e18bd3, tools/convert_hf_to_int4_direct.py, --group-size


def round_weights(named: Iterable[tuple[str, Tensor]], rounding: str) -> list[tuple[str, Tensor]]:
    """Rounds the matrices of the linear layers inside the blocks (``*_proj.weight``).

    Embeddings, output layer, norms and routers stay unrounded, as in quantised checkpoints of Qwen3. int4
    also leaves attention unrounded, as slime does.
    """
    function, inside = ROUNDINGS[rounding], INSIDE.get(rounding, "")
    return [
        (name, function(w) if name.endswith("_proj.weight") and inside in name else w) for name, w in named
    ]


def per_channel(weight: Tensor, largest: float, nearest: Callable[[Tensor], Tensor]) -> Tensor:
    """Rounds [out, in] weights to s nearest(w / s). s = max |w| / largest over each output channel."""
    most = weight.float().abs().amax(-1, keepdim=True)
    scale = torch.where(most > 0, most / largest, 1.0)
    return (nearest(weight.float() / scale) * scale).to(weight.dtype)


def per_group(weight: Tensor, size: int, largest: float, nearest: Callable[[Tensor], Tensor]) -> Tensor:
    """Rounds as `per_channel` does, with a scale for every `size` inputs of a channel.

    If `size` does not divide the number of inputs, each channel has a single scale.
    """
    size = size if weight.shape[1] % size == 0 else weight.shape[1]
    return per_channel(weight.unflatten(1, (-1, size)), largest, nearest).flatten(1)


def e4m3(values: Tensor) -> Tensor:
    """Returns the nearest 8-bit floats: 4 bits of exponent, 3 of mantissa, ties to even."""
    return values.to(torch.float8_e4m3fn).float()


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8": lambda w: per_channel(w, E4M3_MAX, e4m3),
    "int8": lambda w: per_channel(w, 127.0, torch.round),
    "int4": lambda w: per_group(w, INT4_GROUP, 7.0, torch.round),
}
INSIDE = {"int4": ".mlp."}  # part of the names that a rounding is limited to
