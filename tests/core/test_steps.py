"""Single steps where an answer hangs on an edge; the oracle for the rest: tests/core/test_correction.py."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest
import torch

from slime_ext.core import steps as module
from slime_ext.core.correction import Correction, HookInputs, Tokens, apply
from slime_ext.core.metrics.layout import MetricsLayout
from slime_ext.core.needs import Need
from slime_ext.core.prefix_steps import PREFIX_STEPS, PrefixReject
from slime_ext.core.scoped import ZeroOutside
from slime_ext.core.state import Effect
from slime_ext.core.statistics import statistics_of, tabulate
from slime_ext.core.steps import (
    STEPS,
    Clip,
    MinPrefixReweight,
    Normalize,
    Reject,
    Reweight,
    SecondMoment,
    SignedClip,
    Truncate,
    Veto,
)
from slime_ext.errors import ConfigError
from slime_ext.ops.segments import Segments, identity
from slime_ext.testing.steps import on_ranks


def packed(ratios, *, mask=None, advantages=None, lengths=None, logs=False):
    """Tokens with these ratios of proximal to behavior, or their logarithms; the larger log-prob is 0."""
    ratios = torch.tensor(ratios, dtype=torch.float64)
    ratios = ratios if logs else ratios.log()
    mask = torch.ones(len(ratios)) if mask is None else torch.tensor(mask)
    segments = Segments.whole(lengths or [len(ratios)], mask)
    advantages = None if advantages is None else torch.tensor(advantages, dtype=torch.float64)
    return Tokens(segments, ratios.clamp(max=0), -ratios.clamp(min=0), advantages=advantages)


def outcome(ratios, *steps, **fields):
    return Correction(steps=steps)(packed(ratios, **fields), observe=True)


def weights(*args, **fields):
    return outcome(*args, **fields).weights.tolist()


def kept(*args, **fields):
    return outcome(*args, **fields).keep.int().tolist()


def test_truncate_and_clip_are_exact_at_their_bounds_and_say_where_they_acted():
    got = outcome([4.0, 1.5, 0.1], Reweight(), Clip(0.5, 2.0))
    assert got.weights.tolist() == [2.0, pytest.approx(1.5), 0.5] and got.clipped.tolist() == [
        True,
        False,
        True,
    ]
    assert outcome([4.0, 0.1], Reweight(), Truncate(2.0)).clipped.tolist() == [True, False]


MADE = {Reject: Reject(high=2.0), Veto: Veto(low=1e-3), PrefixReject: PrefixReject(high=2.0)}
OF_WEIGHTS = [MADE.get(cls) or cls() for cls in (*STEPS.values(), *PREFIX_STEPS.values(), ZeroOutside)]
OF_WEIGHTS = [step for step in OF_WEIGHTS if Effect.REWEIGHT not in step.effects]


@pytest.mark.parametrize("step", [*OF_WEIGHTS, Clip(0.0, 2.0), Clip(1.0, 3.0)], ids=str)
def test_a_step_moves_weights_from_or_to_0_exactly_if_it_says_so(step):
    tokens = packed([4.0, 1.5, 0.1], advantages=[1.0, -1.0, 1.0])
    correction = Correction(steps=(Reweight(), Truncate(5.0), step))  # normalize requires a bound
    inputs = correction.read(tokens)
    inputs = replace(inputs, table=tabulate(correction.statistics, inputs))
    state = correction.run(inputs, correction.steps[:1])
    state = state._replace(weights=torch.zeros(3).double(), log_ratio=torch.full((3,), -math.inf).double())
    if Need.WHOLE_STEP in step.needs:
        inputs = replace(inputs, plan={step: step.number_for_step([(state, inputs)], identity)})
    assert step.raises_zero == bool((step(state, inputs).weights > 0).any())
    state = state._replace(weights=torch.ones(3).double(), log_ratio=torch.zeros(3).double())
    if Need.WHOLE_STEP in step.needs:
        inputs = replace(inputs, plan={step: step.number_for_step([(state, inputs)], identity)})
    assert step.sets_zero == bool((step(state, inputs).weights == 0).any())


@pytest.mark.parametrize("layout", [None, MetricsLayout()], ids=["", "measured"])
def test_the_host_gets_where_any_of_two_bounds_acted(layout):
    correction = Correction(steps=(Reweight(), Truncate(2.0), Clip(0.5, 3.0)))
    tokens = packed([4.0, 1.0, 0.25])
    result = apply(correction, HookInputs(tokens, torch.ones(3), layout=layout))
    assert result.clipped.tolist() == [1, 0, 1] == correction(tokens).clipped.tolist()


def test_both_ends_of_an_interval_are_inside():
    k2 = Reject("token", "k2", high=0.5)
    assert kept([math.e, 1.0], k2) == [1, 1] and kept([math.e * 1.001, 1.0], k2) == [0, 1]
    assert kept([2.0, 0.5, 1.0], Reject("token", "ratio", low=0.5, high=2.0)) == [1, 1, 1]


@pytest.mark.parametrize("lengths", [[5], [3, 2]], ids=["one sequence", "two"])
def test_a_ratio_of_0_makes_the_later_weights_of_its_sequence_0(lengths):
    ratios, wanted = [2.0, 0.0, 4.0, 0.5, 1.0], []
    for n in lengths:
        of_sequence = ratios[len(wanted) : len(wanted) + n]
        wanted += [w * min(of_sequence[:t], default=1.0) for t, w in enumerate(of_sequence)]
    assert weights(ratios, MinPrefixReweight(), lengths=lengths) == pytest.approx(wanted, rel=1e-12, abs=0)


def test_a_maximum_looks_at_response_tokens_alone():
    assert kept([1.0, 9.0], Reject("sequence", "ratio", "max", high=2.0), mask=[1, 0]) == [1, 0]
    assert kept([0.5, 9.0], Reject("sequence", "ratio", "max", low=0.9), mask=[1, 0]) == [0, 0]


def test_a_quantity_that_no_one_knows_is_refused():
    for words in (("sequence", "mean", "binarykl"), ("sequence", "median", "k3"), ("sentence", "sum", "k3")):
        with pytest.raises(ConfigError, match=r"statistics: expected a known"):
            statistics_of(*words)
    with pytest.raises(ConfigError, match="a known quantity, got 'binarykl'; did you mean 'binary_kl'"):
        Correction().read(packed([1.0])).value_of("binarykl")


def test_two_rejections_give_bounds_by_the_sign_of_the_advantage():
    by_sign = (
        Reject("token", "ratio", high=1.5, when="negative_advantage"),
        Reject("token", "ratio", high=3.0, when="positive_advantage"),
    )
    tokens = {"advantages": [-1.0, -1.0, 0.0, 1.0, 1.0]}
    both = Correction(steps=by_sign)(packed([1.2, 2.0, 4.0, 2.0, 4.0], **tokens))
    assert both.keep.int().tolist() == [1, 0, 0, 1, 0]
    out = {
        when: Reject("token", "k2", high=0.01, when=f"outward_{when}") for when in ("positive", "negative")
    }
    four = {"advantages": [1.0, 1.0, -1.0, -1.0]}
    assert kept([2.0, 0.5, 2.0, 0.5], out["positive"], **four) == [0, 1, 1, 1]
    assert kept([2.0, 0.5, 2.0, 0.5], out["negative"], **four) == [1, 1, 1, 0]


def test_of_advantage_0_topr_takes_the_range_of_positive_ones():
    assert weights([0.5, 0.5], SignedClip("token"), advantages=[0.0, -1.0]) == pytest.approx([1.0, 0.5])


TIGHTEST = [
    Truncate(1.0),
    Clip(1.0, 1.0 + 1e-15),
    Clip(0.0, 1.0),
    SignedClip("token", positive_low=0.0, negative_low=1.0),
    Reject(low=1.0, high=1.0 + 1e-15),
    Reject("sequence", "k2", high=1e-37),
    Reject("sequence", "k1", low=0.0),
    Veto(1.0, 1.0),
    SecondMoment(1e-37),
]


@pytest.mark.parametrize("step", TIGHTEST, ids=str)
def test_the_tightest_bounds_leave_on_policy_data_alone(step):
    steps = (step,) if Effect.REWEIGHT in step.effects else (Reweight(), step)
    got = outcome([1.0, 1.0], *steps, advantages=[1.0, -1.0])
    assert got.weights.tolist() == [1.0, 1.0] and got.keep.all()


@pytest.mark.parametrize(
    ("log_ratios", "threshold", "expected"),
    [
        ([0.0, 0.5], 0.125, [1, 0]),  # a mean of exactly the threshold is too large
        ([0.0, 0.5], 0.1251, [1, 1]),
        ([0.0, 0.5, -0.5], 0.1, [1, 0, 0]),  # equal ones go together
        ([1.0, -1.0, 2.0], 0.5, [1, 1, 0]),  # the smallest stay
    ],
)
def test_the_mean_of_the_squares_that_stay_is_below_the_threshold(log_ratios, threshold, expected):
    assert kept(log_ratios, SecondMoment(threshold), logs=True) == expected


@pytest.mark.parametrize("value", [0.0, 5e-324, 0.1, 1.0, 256.0, sys.float_info.max])
def test_the_largest_value_that_holds_is_found_bit_by_bit(value):
    found = module._last(lambda cuts: cuts <= value, torch.device("cpu"))
    assert found.view(torch.float64).item() == value


def test_where_not_even_0_holds_there_is_none():
    assert module._last(lambda cuts: cuts < 0, torch.device("cpu")).item() == -1


@pytest.mark.parametrize("number", [0.0, 1e-30, 0.3, 88.0, -0.3, -1e4, 1e9, -1e9])
def test_the_largest_number_of_all_ranks_is_found_by_sums_alone(number):
    """Each of three ranks has its own; the second one also an empty micro-batch."""
    ranks = [[torch.tensor([-math.inf, number - rank])] for rank in range(3)]
    ranks[1].append(torch.zeros(0))
    found = on_ranks(lambda rank, all_sum: module._largest(ranks[rank], all_sum), "", 3)
    assert [x.item() for x in found] == [pytest.approx(number, abs=1e-3)] * 3


def test_without_a_number_the_largest_is_0():
    none = [torch.tensor([-math.inf]), torch.zeros(0)]
    assert module._largest(none, lambda values: values).item() == 0


def test_without_any_weight_nothing_is_divided():
    steps = (Reweight(), Truncate(2.0), Normalize())
    assert weights([-2000.0, -2000.0], *steps, logs=True) == [1.0, 1.0]  # equal, if below any number
    assert weights([2.0, 2.0], *steps, mask=[0, 0]) == [0.0, 0.0]
