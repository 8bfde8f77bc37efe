"""Flags as one integer, against a loop."""

from __future__ import annotations

import random

import pytest
import torch

from slime_ext.ops.codes import packed


def test_flags_of_nothing_are_nothing():
    none = torch.zeros(0, dtype=torch.bool)
    for by_product in (False, True):
        assert packed([(0, none, True), (1, none, False)], 2, by_product=by_product).shape == (0,)


@pytest.mark.parametrize("by_product", [False, True])
@pytest.mark.parametrize("bits", [1, 3, 6, 9])
def test_flags_are_packed_bit_by_bit(bits, by_product):
    rng = random.Random(bits)
    rows = [[rng.random() < 0.5 for _ in range(20)] for _ in range(bits)]
    negated = [rng.random() < 0.5 for _ in rows]
    flags = [(i, torch.tensor(r), n) for i, (r, n) in enumerate(zip(rows, negated, strict=True))]
    found = packed(flags, bits, by_product=by_product)
    expected = [
        sum((r[t] != n) << i for i, (r, n) in enumerate(zip(rows, negated, strict=True))) for t in range(20)
    ]
    assert found.tolist() == expected and found.dtype == (torch.uint8 if bits <= 6 else torch.int32)
