"""How many tokens carry which flags: one small integer per token, counted once for all questions."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from slime_ext.ops.segments import as_numbers, is_traced
from slime_ext.ops.tally import count
from slime_ext.ops.uploads import host_ints, host_numbers

STANDINGS = 4  # masked, without a finite behavior log-prob, finite but not kept, kept
LOST, FINITE, KEPT = 1, 2, 3
NARROW = 6  # bits that leave room for a standing in a byte
MOST = 1 << 12  # codes, up to which a product with a 0-1 matrix costs nothing
CELLS = 1 << 14  # codes times bins, up to which both are counted together
STANDING = ((0, 0), (1, 0), (1, 1))  # lost, finite, kept: what counts as finite and as kept


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


def count_flags(
    acted: Tensor,
    mask: Tensor,
    finite: Tensor,
    keep: Tensor,
    queries: tuple[int, ...],
    *,
    rejects: int = 0,
    place: Tensor | None = None,
    bins: int = 1,
) -> tuple[Tensor, Tensor]:
    """[bins, 2] finite tokens and kept tokens at each place, and [Q] for each query the response tokens with
    any of its bits; whole numbers of any dtype. On a CPU.

    Bit 0 stands for every token without a finite behavior log-prob, whether ``acted`` carries it or not.

    Args:
        acted: [T] integers; anything at masked tokens, but no bit beyond those of the queries.
        mask, finite, keep: [T] bool, each inside the one before.
        queries: bits; 0 asks for nothing.
        rejects: bits of which a kept token carries none and any other finite one some; 0 where there are no
            such bits.
        place: [T] integers from 0 to bins - 1, of a dtype that holds CELLS; None: all tokens lie in one bin.
    """
    width = max(1, rejects.bit_length(), *(bits.bit_length() for bits in queries))
    codes = STANDINGS << width
    if place is not None and (codes * bins > CELLS or codes > MOST):
        _, found = count_flags(acted, mask, finite, keep, queries, rejects=rejects)
        return _by_place(finite, keep, place, bins), found
    if codes > MOST:
        return _by_rows(acted, mask, finite, keep, queries)
    if width > NARROW and acted.dtype is torch.uint8:
        acted = acted.int()
    standing = mask.view(torch.uint8) + finite.view(torch.uint8)
    if not rejects:
        standing += keep.view(torch.uint8)
    index = torch.add(acted, standing, alpha=1 << width)
    index = index if place is None else torch.add(index, place, alpha=codes)
    table = count(index, codes * bins).view(bins, codes).double() @ _matrix(width, queries, rejects)
    return table[:, :2], table[0, 2:] if place is None else table[:, 2:].sum(0)


def _by_place(finite: Tensor, keep: Tensor, place: Tensor, bins: int) -> Tensor:
    """[bins, 2] finite and kept tokens at each place."""
    known = finite.view(torch.uint8) + keep.view(torch.uint8)
    found = count(torch.add(known, place, alpha=len(STANDING)), len(STANDING) * bins)
    return found.view(bins, len(STANDING)) @ host_numbers(STANDING, found)


def _by_rows(
    acted: Tensor, mask: Tensor, finite: Tensor, keep: Tensor, queries: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    bits = host_ints(queries, acted.device, torch.int32)[:, None]
    flags = mask.new_empty(2 + len(queries), len(mask))
    torch.stack([finite, keep], out=flags[:2])
    torch.logical_and((acted | ~finite) & bits, mask, out=flags[2:])
    found = flags.sum(1, dtype=torch.float64)
    return found[None, :2], found[2:]


@functools.lru_cache(maxsize=64)
def _matrix(width: int, queries: tuple[int, ...], rejects: int) -> Tensor:
    """[codes, 2 + Q] float64, 1 where a code counts for a query; on the CPU, and small."""
    least = FINITE if rejects else KEPT
    codes = range(STANDINGS << width)
    rows = [
        [code >> width >= FINITE for code in codes],
        [code >> width >= least and not code & rejects for code in codes],
        *([_carries(code, width, bits) for code in codes] for bits in queries),
    ]
    return torch.tensor(rows, dtype=torch.float64).t()


def _carries(code: int, width: int, bits: int) -> bool:
    standing = code >> width
    return bool(standing and code & bits & (1 << width) - 1) or (standing == LOST and bool(bits & 1))
