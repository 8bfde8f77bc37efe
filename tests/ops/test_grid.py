"""Sums over segments from a grid of blocks against a plain loop."""

import math
import random

import pytest
import torch

from slime_ext.ops import arrays
from slime_ext.ops.grid import Extreme, Grid

CPU = torch.device("cpu")
RNG = random.Random(0)
LENGTHS = [
    (),
    (0,),
    (1,),
    (31, 1),
    (32,),
    (33, 0, 0, 31),
    (64, 2),
    (100,),
    (200, 0, 3, 1000, 32, 32, 64, 1),
    (0, 0, 5, 0),
    *(tuple(RNG.choice((0, 1, 5, 40, 300)) for _ in range(RNG.randint(1, 30))) for _ in range(20)),
]


def loop(rows, lengths, extremes):
    """[K + E, S]: sums of whole numbers, then 1 where a token lies beyond the limit."""
    found, start = [], 0
    for length in lengths:
        parts = [row[start : start + length] for row in rows]
        beyond = [any(x < -e.limit if e.below else x > e.limit for x in parts[e.row]) for e in extremes]
        found.append([math.fsum(part) for part in parts] + [float(any_) for any_ in beyond])
        start += length
    return [list(column) for column in zip(*found, strict=True)] or [[]] * (len(rows) + len(extremes))


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}x{sum(lengths)}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("by", ["numpy", "a grid"])
def test_sums_and_extremes_are_those_of_a_loop(lengths, dtype, by, monkeypatch):
    if by == "a grid":  # as on other devices
        monkeypatch.setattr(arrays, "is_array", lambda values: False)
    rng = random.Random(len(lengths))
    rows = [[float(rng.randint(-9, 9)) for _ in range(sum(lengths))] for _ in range(3)]
    extremes = [Extreme(0, True, 8.0), Extreme(2, False, 8.0)]
    got = Grid(lengths, CPU).sums(torch.tensor(rows, dtype=dtype).view(3, -1).unbind(), extremes)
    expected = loop(rows, lengths, extremes)
    assert got[:3].tolist() == expected[:3]
    assert (got[3:] > 0).double().tolist() == expected[3:]


@pytest.mark.parametrize("by", ["numpy", "a grid"])
@pytest.mark.parametrize("drift", [0.0, -1e-3])
def test_long_float32_sums_stay_within_the_bound(by, drift, monkeypatch):
    """31 roundings inside a block, as ``Segments.sum_shares`` states it."""
    if by == "a grid":
        monkeypatch.setattr(arrays, "is_array", lambda values: False)
    values = torch.randn(131072, generator=torch.Generator().manual_seed(0)) * 0.02 + drift
    got = Grid((131072,), CPU).sums([values]).item()
    bound = 31 * 2**-24 * values.abs().double().sum().item()
    assert abs(got - math.fsum(values.tolist())) < bound / 10 < bound < 0.01


@pytest.mark.filterwarnings("error")
def test_sums_beyond_all_numbers_are_infinite_without_a_word():
    rows = [torch.tensor([3e38] * 4), torch.tensor([math.inf, -math.inf, math.nan, 1.0])]
    found = Grid((3, 1), CPU).sums(rows)
    assert found[0].tolist() == [math.inf, pytest.approx(3e38)] and found[1, 0].isnan() and found[1, 1] == 1


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}x{sum(lengths)}")
def test_partial_sums_add_up_to_the_same(lengths):
    grid = Grid(lengths, CPU)
    row = torch.arange(sum(lengths), dtype=torch.float64)
    assert grid.totals([grid.partial(row)]).tolist() == loop([row.tolist()], lengths, [])


@pytest.mark.parametrize("by", ["numpy", "a grid"])
def test_what_is_not_finite_stays_in_its_segment(by, monkeypatch):
    if by == "a grid":
        monkeypatch.setattr(arrays, "is_array", lambda values: False)
    lengths = (70, 40, 300, 1)
    row = torch.ones(sum(lengths))
    row[75] = math.nan
    assert Grid(lengths, CPU).sums([row])[0].isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}x{sum(lengths)}")
def test_spread_repeats_a_value_for_each_token(lengths):
    values = torch.arange(float(len(lengths)))
    expected = [float(i) for i, length in enumerate(lengths) for _ in range(length)]
    assert Grid(lengths, CPU).spread(values).tolist() == expected


def test_a_thousand_flags_are_more_than_a_byte_holds():
    assert Grid((1000, 3), CPU).sums([torch.ones(1003, dtype=torch.uint8)]).tolist() == [[1000, 3]]
