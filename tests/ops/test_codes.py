"""Flags counted through codes, against a loop over the tokens."""

from __future__ import annotations

import random

import pytest
import torch

from slime_ext.ops import codes
from slime_ext.ops.codes import count_flags


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


@pytest.mark.parametrize("most", [codes.MOST, 0], ids=["codes", "rows"])
@pytest.mark.parametrize(("steps", "dtype"), [(5, torch.uint8), (5, torch.int32), (12, torch.int32)])
def test_flags_are_counted_as_a_loop_does(steps, dtype, most, monkeypatch):
    monkeypatch.setattr(codes, "MOST", most)
    for seed in range(20):
        mask, finite, keep, acted, queries = random_flags(seed, steps)
        flags = (torch.tensor(f, dtype=torch.bool) for f in (mask, finite, keep))
        found = count_flags(torch.tensor(acted, dtype=dtype), *flags, queries)
        assert found.tolist() == by_loop(mask, finite, keep, acted, queries), seed
