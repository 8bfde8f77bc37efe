"""Flags of many steps as one small integer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime_ext.ops.segments import as_numbers, is_traced
from slime_ext.ops.uploads import host_numbers

NARROW = 6  # bits that a byte is taken for


def packed(flags: Sequence[tuple[int, Tensor, bool]], bits: int, *, by_product: bool = False) -> Tensor:
    """[N] integers with bit i set where flag i is: an operation per flag, or two in all.

    Args:
        flags: (i, [N] bool, whether the bit is set where the flag is not), each i once.
        bits: how many there may be; few make bytes, more int32.
        by_product: whether bytes on a CPU are made by a product with powers of two: slower per flag.
    """
    narrow = bits <= NARROW and not is_traced(flags[0][1])
    every = sum(1 << i for i, _, negated in flags if negated)
    shares = [(-1 if negated else 1) << i for i, _, negated in flags]
    if narrow and by_product and flags[0][1].device.type == "cpu":
        table = torch.stack([flag for _, flag, _ in flags]).view(torch.uint8)
        powers = host_numbers(tuple(share % 256 for share in shares), table)
        start = host_numbers((every,), table).expand(table.shape[1])
        return torch.addmv(start, table.transpose(0, 1), powers)
    dtype = torch.uint8 if narrow else torch.int32
    return _added([as_numbers(flag, dtype) for _, flag, _ in flags], shares, every)


def _added(numbers: Sequence[Tensor], shares: Sequence[int], start: int) -> Tensor:
    """start + the sum of the numbers, each times its share; for bytes modulo 256."""
    if numbers[0].dtype is torch.uint8:
        shares, first = [share % 256 for share in shares], -shares[0] % 256
    else:
        first = -shares[0]
    code = torch.rsub(numbers[0], start, alpha=first)
    for number, share in zip(numbers[1:], shares[1:], strict=True):
        code = torch.add(code, number, alpha=share)
    return code
