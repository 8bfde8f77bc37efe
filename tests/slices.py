"""A response as context-parallel ranks hold it."""

from __future__ import annotations

from typing import Any

import torch

from slime_ext.hosts.slices import zigzag


def slice_response(values: Any, total_length: int, response_length: int, cp_rank: int, cp_size: int) -> Any:
    """A full response [R] -> the part [L] that this rank holds; the identity for one rank."""
    if cp_size == 1:
        return values
    (a, b), (c, d) = zigzag(total_length, response_length, cp_rank, cp_size)
    return values[a:b] + values[c:d] if isinstance(values, list) else torch.cat([values[a:b], values[c:d]])
