"""What numpy computes, against loops and against PyTorch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from slime_ext.ops import arrays
from slime_ext.ops.ratios import finite_tokens
from slime_ext.ops.segments import Segments

EDGES = (-2.0, -0.1, 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int16, torch.uint8, torch.bool])
def test_values_are_repeated_along_the_last_dimension(dtype):
    values = torch.tensor([[1, 0, 1], [0, 1, 1]]).to(dtype)
    found = arrays.repeated(values, np.array([2, 0, 3]))
    assert found.dtype is dtype
    assert found.tolist() == [[v[0]] * 2 + [v[2]] * 3 for v in values.tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_edges_are_reached_at_the_edge(dtype):
    values = torch.tensor([-math.inf, -2.0, -1.0, -0.1, 0.0, 0.5, math.inf, math.nan], dtype=dtype)
    edges = torch.tensor(EDGES, dtype=dtype).tolist()
    expected = [sum(x >= edge for edge in edges) for x in values.tolist()]
    assert arrays.reached(values, EDGES).tolist() == expected == [0, 1, 1, 2, 2, 3, 3, 0]


def test_numbers_differ_as_in_pytorch():
    one = torch.tensor([1.0, 0.0, math.nan, math.inf, 2.0])
    other = torch.tensor([1.0, -0.0, math.nan, math.inf, 2.5])
    assert arrays.differ(one, other).tolist() == (one != other).tolist() == [False, False, True, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # numpy knows no bfloat16
def test_finite_tokens_are_those_of_the_mask(dtype):
    behavior = torch.tensor([-1.0, math.nan, -math.inf, math.inf, math.nan, -3e38, -2.0], dtype=dtype)
    mask = torch.tensor([1, 1, 1, 1, 0, 1, 0], dtype=torch.bool)
    assert finite_tokens(behavior, mask).tolist() == [True, False, False, False, False, True, False]


ANY = [1.5, -0.0, math.nan, -math.inf, math.inf, 3e38, -1e-45]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_selected_is_the_same_bits_and_all_else_0(dtype):
    values, flags = torch.tensor(ANY * 2, dtype=dtype), torch.tensor([True] * 7 + [False] * 7)
    room = torch.full_like(values, 7)
    for found in (arrays.selected(flags, values), arrays.selected(flags, values, room), room):
        assert found.dtype is dtype and found.numpy()[:7].tobytes() == values.numpy()[:7].tobytes()
        assert found.numpy()[7:].tobytes() == bytes(7 * dtype.itemsize)
    assert arrays.selected(flags, values, values).numpy().tobytes() == room.numpy().tobytes()
    one = torch.tensor(1, dtype=dtype).expand(2)
    assert arrays.selected(torch.tensor([False, True]), one).tolist() == [0, 1]


def test_what_numpy_cannot_see_is_spread_by_an_index():
    segments = Segments.whole([2, 0, 1], torch.ones(3, dtype=torch.bool))
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    segments.spread(values).sum().backward()
    assert values.grad.tolist() == [2, 0, 1]
    assert segments.spread(values.detach().to(torch.bfloat16)).tolist() == [1, 1, 3]
