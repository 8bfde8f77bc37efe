"""Numbers that couple samples, where they lie on an edge."""

from __future__ import annotations

import sys

import pytest
import torch

from slime_ext.core import steps as module
from slime_ext.core.correction import Correction, Tokens
from slime_ext.core.steps import Normalize, Reweight, SecondMoment, Truncate
from slime_ext.ops.segments import Segments


def outcome(log_ratios, *steps, mask=None):
    """The outcome for one sequence with these log-ratios of proximal to behavior."""
    proximal = torch.tensor(log_ratios, dtype=torch.float64)
    segments = Segments.whole([len(log_ratios)], torch.tensor(mask or [1] * len(log_ratios)))
    return Correction(steps=steps)(Tokens(segments, proximal, torch.zeros_like(proximal)))


@pytest.mark.parametrize(
    ("log_ratios", "threshold", "kept"),
    [
        ([0.0, 0.5], 0.125, [1, 0]),  # a mean of exactly the threshold is too large
        ([0.0, 0.5], 0.1251, [1, 1]),
        ([0.0, 0.5, -0.5], 0.1, [1, 0, 0]),  # equal ones go together
        ([1.0, -1.0, 2.0], 0.5, [1, 1, 0]),  # the smallest stay
    ],
)
def test_the_mean_of_the_squares_that_stay_is_below_the_threshold(log_ratios, threshold, kept):
    assert outcome(log_ratios, SecondMoment(threshold)).keep.int().tolist() == kept


@pytest.mark.parametrize("value", [0.0, 5e-324, 0.1, 1.0, 256.0, sys.float_info.max])
def test_the_largest_value_that_holds_is_found_bit_by_bit(value):
    found = module._last(lambda cuts: cuts <= value, torch.device("cpu"))
    assert found.view(torch.float64).item() == value


def test_where_not_even_0_holds_there_is_none():
    assert module._last(lambda cuts: cuts < 0, torch.device("cpu")).item() == -1


def test_without_any_weight_nothing_is_divided():
    steps = (Reweight(), Truncate(2.0), Normalize())
    assert outcome([-2000.0, -2000.0], *steps).weights.tolist() == [0.0, 0.0]
    assert outcome([0.5, 0.5], *steps, mask=[0, 0]).weights.tolist() == [0.0, 0.0]
