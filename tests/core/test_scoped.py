"""Steps that only other systems need: clamped log-ratios, statistics over kept tokens, zeroed weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import yaml

from slime_ext import load_config
from slime_ext.core.correction import Tokens
from slime_ext.core.losses import Bounds
from slime_ext.errors import ConfigError
from slime_ext.ops.segments import Segments
from slime_ext.testing.steps import on_ranks, split
from tests.batches import tokens
from tests.tools.convert.common import batch_of

TOKEN_MASK = {"reject": {"low": 0.5, "high": 2.0}}
CAP = {"truncate": {"high": 100.0}}


def outcome(steps, log_ratios, mask=None, observe=False):
    """One sequence whose behavior log-probs are -1."""
    proximal = torch.tensor(log_ratios, dtype=torch.float64) - 1
    segments = Segments.whole([len(log_ratios)], torch.tensor(mask or [1] * len(log_ratios)))
    return load_config({"steps": steps})(
        Tokens(segments, proximal, torch.full_like(proximal, -1)), observe=observe
    )


def test_a_zeroed_weight_stays_in_the_masks_and_counts_as_clipped():
    steps = ["reweight", {"zero_outside": {"low": 0.5, "high": 2.0}}]
    found = outcome(steps, [0.0, 3.0], observe=True)
    assert found.weights.tolist() == [1.0, 0.0]
    assert found.keep.tolist() == [True, True] and found.clipped.tolist() == [False, True]


@pytest.mark.parametrize(
    ("level", "unit", "aggregate", "bounds"),
    [
        ("token", "token", "sum", True),
        ("token", "token", "mean", True),
        ("sequence", "sequence", "sum", True),
        ("geometric", "sequence", "mean", True),
        ("turn", "turn", "sum", True),
        ("token", "sequence", "mean", False),
        ("token", "turn", "sum", False),
        ("sequence", "sequence", "mean", False),
        ("sequence", "token", "sum", False),
        ("geometric", "sequence", "sum", False),
        ("turn", "sequence", "sum", False),
    ],
)
def test_a_band_bounds_a_weight_that_is_the_ratio_it_looks_at(level, unit, aggregate, bounds):
    band = {"zero_outside": {"unit": unit, "aggregate": aggregate}}
    steps = [{"reweight": {"level": level}}, band]
    correction = load_config({"steps": steps})
    assert correction.bounds_weights is bounds
    apart = torch.tensor([100.0, -25.0, -25.0, -25.0, -25.0])
    numerator, behavior = apart - 60, torch.full((5,), -60.0)
    packed = Tokens(Segments.whole([5], torch.ones(5)), numerator, behavior)
    host_loss = torch.ones(5, requires_grad=True)
    loss, _ = correction.loss(correction(packed), packed, host_loss, Bounds())
    (gradient,) = torch.autograd.grad(loss.sum(), host_loss)
    assert loss.isfinite().all() and gradient.isfinite().all()
    if not bounds:
        with pytest.raises(ConfigError, match="expected a truncate or clip step before it"):
            load_config({"steps": [*steps, "normalize"]})


BOUNDED = """
    [{reject: {low: 0.5, high: 2.0}}, {reweight: {level: sequence, over: kept}}, {zero_outside: {unit: sequence}}]: no
    [{reweight: {clamp: 20.0}}, zero_outside]: yes
    [{reweight: {level: sequence, clamp: 20.0}}, {zero_outside: {unit: sequence}}]: no
    [{reweight: {level: geometric, clamp: 20.0}}]: yes
    [{reweight: {level: sequence, clamp: 20.0}}]: no
    [min_prefix_reweight, zero_outside]: no
    [reweight, {zero_outside: {unit: sequence}}, {truncate: {high: 3.0}}]: yes
    [reweight, {truncate: {high: 3.0}}, {zero_outside: {unit: sequence}}]: yes
    [{reweight: {level: sequence}}, {truncate: {high: 1.0e+30}}]: no
"""  # noqa: E501


@pytest.mark.parametrize("line", BOUNDED.strip().splitlines())
def test_what_bounds_a_weight(line):
    steps, _, bounds = line.rpartition(": ")
    assert load_config({"steps": yaml.safe_load(steps)}).bounds_weights is (bounds == "yes")


def test_splitting_sequences_over_ranks_changes_nothing():
    steps = [
        TOKEN_MASK,
        {"reweight": {"level": "sequence", "over": "kept"}},
        CAP,
        {"reject": {"unit": "sequence", "aggregate": "mean", "low": 0.8, "over": "kept", "clamp": 1.0}},
        {"zero_outside": {"unit": "sequence", "low": 0.1, "high": 3.0}},
    ]  # fmt: skip
    correction, (packed, _) = load_config({"steps": steps}), tokens(batch_of(1) + batch_of(3))
    noise = 0.8 * torch.randn(packed.segments.size, generator=torch.Generator().manual_seed(1))
    packed = replace(packed, proximal=packed.behavior + noise)
    whole = correction(packed)

    def part(rank, all_sum):
        held = split(packed, rank)
        segments = replace(held.segments, all_sum=all_sum)
        return segments.positions, correction(replace(held, segments=segments))

    for positions, found in on_ranks(part, ""):
        assert torch.equal(found.keep, whole.keep[positions])
        torch.testing.assert_close(found.weights, whole.weights[positions])
    assert 0 < int(whole.keep.sum()) < int(packed.segments.mask.sum())
