"""Flags counted through codes, against a loop over the tokens."""

from __future__ import annotations

import random

import pytest
import torch

from slime_ext.ops import codes
from slime_ext.ops.codes import count_flags, packed


def random_flags(seed, steps):
    rng = random.Random(seed)
    size = rng.choice([0, 1, 50, 300])
    mask = [rng.random() < 0.8 for _ in range(size)]
    finite = [m and rng.random() < 0.9 for m in mask]
    keep = [f and rng.random() < 0.7 for f in finite]
    acted = [rng.getrandbits(steps + 1) for _ in range(size)]
    queries = [rng.getrandbits(steps + 1) for _ in range(5)] + [0, (1 << steps + 1) - 1]
    return mask, finite, keep, acted, tuple(queries)


def by_loop(mask, finite, keep, acted, queries):
    lost = [a | (m and not f) for a, m, f in zip(acted, mask, finite, strict=True)]
    flags = ([m and bool(a & bits) for m, a in zip(mask, lost, strict=True)] for bits in queries)
    return [sum(finite), sum(keep), *map(sum, flags)]


def joined(found):
    kept, acted = found
    return [*kept[0].tolist(), *acted.tolist()]


@pytest.mark.parametrize("most", [codes.MOST, 0], ids=["codes", "rows"])
@pytest.mark.parametrize(("steps", "dtype"), [(5, torch.uint8), (5, torch.int32), (12, torch.int32)])
def test_flags_are_counted_as_a_loop_does(steps, dtype, most, monkeypatch):
    monkeypatch.setattr(codes, "MOST", most)
    for seed in range(20):
        mask, finite, keep, acted, queries = random_flags(seed, steps)
        flags = (torch.tensor(f, dtype=torch.bool) for f in (mask, finite, keep))
        found = count_flags(torch.tensor(acted, dtype=dtype), *flags, queries)
        assert joined(found) == by_loop(mask, finite, keep, acted, queries), seed


@pytest.mark.parametrize("limits", [{}, {"MOST": 0}, {"CELLS": 64}], ids=["codes", "rows", "cells"])
@pytest.mark.parametrize(("steps", "dtype"), [(5, torch.uint8), (5, torch.int32), (9, torch.int32)])
def test_flags_are_counted_where_the_tokens_lie(steps, dtype, limits, monkeypatch):
    for name, most in limits.items():
        monkeypatch.setattr(codes, name, most)
    for seed in range(20):
        *rows, queries = random_flags(seed, steps)
        place = [random.Random(seed).randrange(3) for _ in rows[0]]
        mask, finite, keep = (torch.tensor(row, dtype=torch.bool) for row in rows[:3])
        acted, at = torch.tensor(rows[3], dtype=dtype), torch.tensor(place, dtype=torch.int16)
        kept, found = count_flags(acted, mask, finite, keep, queries, place=at, bins=4)
        assert found.tolist() == by_loop(*rows, queries)[2:], seed
        for bin, counted in enumerate(kept.tolist()):
            part = ([x for x, p in zip(row, place, strict=True) if p == bin] for row in rows)
            assert counted == by_loop(*part, queries)[:2], seed


def test_kept_tokens_may_be_known_by_their_bits():
    for seed in range(20):
        mask, finite, _, acted, queries = random_flags(seed, 4)
        keep = [f and not a & 0b101 for f, a in zip(finite, acted, strict=True)]
        flags = [torch.tensor(f, dtype=torch.bool) for f in (mask, finite, keep)]
        found = count_flags(torch.tensor(acted, dtype=torch.uint8), *flags, queries, rejects=0b101)
        assert joined(found) == by_loop(mask, finite, keep, acted, queries), seed


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
