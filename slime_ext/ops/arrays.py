"""What numpy does faster than PyTorch with the tensors of a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

OPERATIONS = {"repeated": 1, "finite": 1, "reached": 2, "ends": 2}  # what a call counts for beside PyTorch's


def is_array(values: Tensor) -> bool:
    """Whether numpy can look at a tensor: on the CPU, without gradient, of a dtype that it knows, and nothing
    that a compiler records."""
    plain = type(values) is Tensor and values.device.type == "cpu" and not values.requires_grad
    return plain and values.dtype is not torch.bfloat16


def repeated(values: Tensor | np.ndarray, times: np.ndarray) -> Tensor:
    """[..., N] -> [..., sum of times], each value as often as its number says: a sixth of the time of an
    index."""
    return torch.from_numpy(np.repeat(np.asarray(values), times, axis=-1))


def finite(values: Tensor) -> Tensor:
    """Bool, shaped like the values."""
    return torch.from_numpy(np.isfinite(values.numpy()))


def reached(values: Tensor, edges: Sequence[float]) -> Tensor:
    """[T] -> [T] bytes, how many of the edges a value has reached, each in the dtype of the values."""
    values = values.numpy()
    flags = np.greater_equal(values, np.array(edges, dtype=values.dtype)[:, None])
    return torch.from_numpy(np.add.reduce(flags.view(np.uint8), 0, dtype=np.uint8))


def ends(values: Tensor) -> Tensor:
    """[T] -> [2], the largest and the negated smallest of those that are not NaN; -inf for none."""
    values = values.numpy()
    highest, lowest = np.fmax.reduce(values, initial=-np.inf), np.fmin.reduce(values, initial=np.inf)
    return torch.from_numpy(np.array([highest, -lowest], dtype=values.dtype))
