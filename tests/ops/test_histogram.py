"""The histogram against comparing every value with every edge."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from slime_ext.ops.histogram import LogBins

BINS = (LogBins(), LogBins(low=-3, high=2, digits=1), LogBins(low=-20, high=7, digits=7))


def counted(bins, values):
    keys = bins.keys(torch.tensor(values))
    return bins.ordered(torch.bincount(keys, minlength=bins.size)).tolist()


@pytest.mark.parametrize("bins", BINS, ids=str)
def test_every_value_lies_between_the_edges_of_its_bin(bins):
    values = [0.0, -0.0, 1e-30, 1e30, 1.0, 1.5, 2.0**bins.low, 2.0**bins.high]
    values += torch.randn(300, generator=torch.Generator().manual_seed(0)).exp().tolist()
    for sign in (1, -1):
        for value in (sign * x for x in values):
            found = counted(bins, [value])
            (index,) = [i for i, count in enumerate(found) if count]
            low, high = bins.edges(index)
            inside = low < value < high or abs(value) == min(abs(low), abs(high))
            assert inside and len(found) == bins.count, (value, low, high)


@pytest.mark.parametrize("bins", BINS, ids=str)
def test_bins_follow_each_other_and_are_no_wider_than_they_say(bins):
    edges = [bins.edges(i) for i in range(bins.count)]
    assert edges[0][0] == -math.inf and edges[-1][1] == math.inf
    assert all(before[1] == after[0] for before, after in itertools.pairwise(edges))
    assert all(high / low <= 1 + 2.0**-bins.digits for low, high in edges[bins.side + 2 : -1])
    begins = bins.lower_ends(torch.arange(bins.side + 2)).tolist()
    assert begins == [0, *(low for low, _ in edges[bins.side + 2 :])]


@pytest.mark.parametrize("q", [0.01, 0.5, 0.99])
def test_a_quantile_is_within_half_a_bin(q):
    values = torch.randn(5000, generator=torch.Generator().manual_seed(1)).tolist()
    exact = sorted(values)[math.ceil(q * 5000) - 1]
    for bins in BINS[::2]:
        found = bins.quantile(counted(bins, values), q)
        assert found == pytest.approx(exact, rel=2.0 ** -(bins.digits + 1))


def test_a_quantile_beyond_the_ends_is_infinite_and_0_around_0():
    bins = LogBins(low=-3, high=2, digits=1)
    found = [bins.quantile(counted(bins, [x, x, x]), 0.5) for x in (-9.0, -0.01, 0.0, 0.01, 9.0)]
    assert found == [-math.inf, 0, 0, 0, math.inf]


@pytest.mark.parametrize("bins", BINS, ids=str)
def test_the_place_of_a_key_is_the_bin_that_its_count_goes_to(bins):
    keys = torch.arange(bins.size)
    of_places = torch.zeros(bins.count, dtype=torch.int64).index_add_(0, bins.places(keys), keys)
    assert torch.equal(of_places, bins.ordered(keys))
    assert bins.places(keys.numpy()).tolist() == bins.places(keys).tolist()
