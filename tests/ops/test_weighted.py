"""A loss times factors: the product, its gradient, and what must reach neither."""

from __future__ import annotations

import math

import pytest
import torch

from slime_ext.ops.weighted import weighted

LOSS = [0.5, -2.0, math.nan, math.inf, 3.0]
FACTOR = [2.0, 0.25, 1.0, 0.0, 4.0]
KEEP = [True, True, False, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_product_and_its_gradient_are_0_where_nothing_is_kept(dtype):
    loss = torch.tensor(LOSS, dtype=dtype, requires_grad=True)
    factor = torch.tensor(FACTOR, dtype=dtype)
    found = weighted(loss, factor, torch.tensor(KEEP))
    assert found.dtype is dtype and found.tolist() == [1.0, -0.5, 0.0, 0.0, 0.0]
    (found * torch.tensor([1.0, 10.0, math.nan, math.inf, 1.0], dtype=dtype)).sum().backward()
    assert loss.grad.tolist() == [2.0, 2.5, 0.0, 0.0, 0.0]


def test_a_loss_without_gradient_has_none():
    found = weighted(torch.tensor([2.0, 3.0]), torch.tensor([3.0, 1.0]), torch.tensor([True, False]))
    assert found.tolist() == [6.0, 0.0] and not found.requires_grad
