"""Steps that only other systems need: clamped log-ratios, statistics over kept tokens, zeroed weights."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from slime_ext import load_config
from slime_ext.core.correction import Tokens
from slime_ext.core.losses import Bounds
from slime_ext.errors import ConfigError
from slime_ext.host.packing import Parallel, pack_segments
from slime_ext.ops.segments import Segments
from tests.slices import slice_response

TOKEN_MASK = {"reject": {"low": 0.5, "high": 2.0}}
CAP = {"truncate": {"high": 100.0}}


def outcome(steps, log_ratios, mask=None, observe=False):
    """One sequence whose behavior log-probs are -1."""
    proximal = torch.tensor(log_ratios, dtype=torch.float64) - 1
    segments = Segments.whole([len(log_ratios)], torch.tensor(mask or [1] * len(log_ratios)))
    return load_config({"steps": steps})(
        Tokens(segments, proximal, torch.full_like(proximal, -1)), observe=observe
    )


@pytest.mark.parametrize(("clamp", "kept"), [(20.0, True), (None, False)])
def test_a_clamped_sum_forgets_how_far_a_token_is(clamp, kept):
    step = {"reject": {"unit": "sequence", "aggregate": "sum", "low": 0.5, "high": 2.0, "clamp": clamp}}
    assert outcome([step], [25.0, -20.0]).keep.tolist() == [kept, kept]


@pytest.mark.parametrize("option", ["seq_sum_k1", "seq_mean_k1"])
def test_verls_divergences_are_clamped_per_token(option):
    block = {"rollout_rs": option, "rollout_rs_threshold": "0.5_2.0"}
    keep = load_config({"verl": block}).steps[0]
    assert keep.clamp == 20.0


@pytest.mark.parametrize(("over", "weight"), [("kept", math.exp(0.3)), ("response", math.exp(3.3))])
def test_a_weight_over_kept_tokens_leaves_the_rejected_out(over, weight):
    steps = [TOKEN_MASK, {"reweight": {"level": "sequence", "over": over}}, CAP]
    weights = outcome(steps, [0.1, 3.0, 0.2]).weights.tolist()
    assert weights == pytest.approx([weight, 0.0, weight])


@pytest.mark.parametrize(("over", "kept"), [("kept", [True, False, True]), ("response", [False] * 3)])
def test_a_mean_over_kept_tokens_counts_them_alone(over, kept):
    geometric = {"unit": "sequence", "aggregate": "mean", "low": 0.8, "high": 1.25, "over": over}
    assert outcome([TOKEN_MASK, {"reject": geometric}], [0.1, 3.0, 0.2]).keep.tolist() == kept


def test_a_zeroed_weight_stays_in_the_masks_and_counts_as_clipped():
    steps = ["reweight", {"zero_outside": {"low": 0.5, "high": 2.0}}]
    found = outcome(steps, [0.0, 3.0], observe=True)
    assert found.weights.tolist() == [1.0, 0.0]
    assert found.keep.tolist() == [True, True] and found.clipped.tolist() == [False, True]


def test_an_infinite_ratio_outside_the_band_weighs_nothing():
    steps = ["reweight", {"zero_outside": {"low": 0.5, "high": 2.0}}]
    assert outcome(steps, [0.0, 800.0]).weights.tolist() == [1.0, 0.0]


TOKEN, SEQUENCE = {"level": "token"}, {"level": "sequence"}


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


@pytest.mark.parametrize(
    ("steps", "bounds"),
    [
        (
            [TOKEN_MASK, {"reweight": {**SEQUENCE, "over": "kept"}}, {"zero_outside": {"unit": "sequence"}}],
            False,
        ),
        ([{"reweight": {**TOKEN, "clamp": 20.0}}, "zero_outside"], True),
        ([{"reweight": {**SEQUENCE, "clamp": 20.0}}, {"zero_outside": {"unit": "sequence"}}], False),
        ([{"reweight": {"level": "geometric", "clamp": 20.0}}], True),
        ([{"reweight": {**SEQUENCE, "clamp": 20.0}}], False),
        (["min_prefix_reweight", "zero_outside"], False),
        (["reweight", {"zero_outside": {"unit": "sequence"}}, {"truncate": {"high": 3.0}}], True),
        (["reweight", {"truncate": {"high": 3.0}}, {"zero_outside": {"unit": "sequence"}}], True),
        (["reweight", {"truncate": {"high": 1.0e30}}], False),
    ],
)
def test_what_bounds_a_weight(steps, bounds):
    assert load_config({"steps": steps}).bounds_weights is bounds


@pytest.mark.parametrize(
    ("step", "line"),
    [
        ({"zero_outside": {"low": 1.5, "high": 2.0}}, "zero_outside: expected 0 <= low <= 1 <= high"),
        ({"reweight": {"clamp": -1.0}}, "reweight.clamp: expected a number > 0"),
        (
            {"reject": {"unit": "sequence", "aggregate": "max", "low": 0.5, "over": "kept"}},
            "reject.over: expected response beside aggregate max with a lower bound",
        ),
    ],
)
def test_what_could_not_work_is_refused(step, line):
    with pytest.raises(ConfigError, match=line):
        load_config({"steps": [step]})


class Ranks:
    """An ``all_sum`` for threads that each play one context-parallel rank."""

    def __init__(self, size):
        self.barrier, self.values = threading.Barrier(size), [None] * size

    def all_sum(self, rank):
        def reduce(values):
            self.values[rank] = values.clone()
            self.barrier.wait()
            total = sum(self.values)
            self.barrier.wait()
            return total

        return reduce


def test_splitting_sequences_over_ranks_changes_nothing():
    steps = [
        TOKEN_MASK,
        {"reweight": {"level": "sequence", "over": "kept"}},
        CAP,
        {"reject": {"unit": "sequence", "aggregate": "mean", "low": 0.5, "over": "kept", "clamp": 1.0}},
        {"zero_outside": {"unit": "sequence", "low": 0.1, "high": 3.0}},
    ]  # fmt: skip
    correction, lengths = load_config({"steps": steps}), [13, 6]
    totals = [n + 3 for n in lengths]  # with the prompt
    torch.manual_seed(1)
    proximal = [torch.randn(n, dtype=torch.float64) * 0.8 - 1 for n in lengths]
    behavior, masks = [torch.full_like(p, -1) for p in proximal], [torch.ones(n) for n in lengths]
    whole = correction(
        Tokens(Segments.whole(lengths, torch.cat(masks)), torch.cat(proximal), torch.cat(behavior))
    )
    ranks, parts = Ranks(2), {}

    def play(rank):
        segments = pack_segments(masks, totals, lengths, here=Parallel(rank, 2, ranks.all_sum(rank)))
        local = [
            torch.cat([slice_response(x, t, len(x), rank, 2) for x, t in zip(xs, totals, strict=True)])
            for xs in (proximal, behavior)
        ]
        parts[rank] = (segments.positions, correction(Tokens(segments, *local)))

    threads = [threading.Thread(target=play, args=(rank,)) for rank in (0, 1)]
    [thread.start() for thread in threads]
    [thread.join(timeout=60) for thread in threads]
    for positions, part in parts.values():
        assert torch.equal(part.keep, whole.keep[positions])
        torch.testing.assert_close(part.weights, whole.weights[positions])
    assert len(parts) == 2 and 0 < int(whole.keep.sum()) < sum(lengths)
