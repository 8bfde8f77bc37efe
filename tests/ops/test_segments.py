"""Reductions over packed sequences against plain loops, their accuracy at 128k tokens, and what must not
leak."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from slime_ext.ops.prefixes import prefix_mean, prefix_min, prefix_sum
from slime_ext.ops.segments import Segments, identity, selected

NAN = math.nan


def random_case(seed):
    rng = random.Random(seed)
    lengths = [
        rng.choice([0, 1, rng.randint(2, 30), rng.randint(200, 700)]) for _ in range(rng.randint(0, 6))
    ]
    masks = [[int(rng.random() < rng.choice([0.0, 0.5, 0.9])) for _ in range(n)] for n in lengths]
    values = [[rng.gauss(0, 1) if m else NAN for m in mask] for mask in masks]
    flat = torch.tensor([x for v in values for x in v], dtype=torch.float64)
    mask = torch.tensor([m for ms in masks for m in ms], dtype=torch.int32)
    counted = [[x for x, m in zip(v, ms, strict=True) if m] for v, ms in zip(values, masks, strict=True)]
    return Segments.whole(lengths, mask), flat, counted, masks


REDUCTIONS = {
    "sum": math.fsum,
    "mean": lambda v: math.fsum(v) / max(len(v), 1),
    "max": lambda v: max(v, default=-math.inf),
}


def by_turn(values, masks):
    """The values of each turn, from turn 1 on."""
    found, flat = [], iter(values)
    for mask in masks:
        for m, before in zip(mask, [0, *mask], strict=False):
            value = next(flat)
            if m and not before:
                found.append([])
            if m:
                found[-1].append(value)
    return found


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_match_a_loop(name):
    for seed in range(60):
        segments, values, counted, masks = random_case(seed)
        turns = by_turn(values.tolist(), masks)
        for unit, groups in (("sequence", counted), ("turn", [[], *turns])):
            expected = torch.tensor([REDUCTIONS[name](v) for v in groups], dtype=torch.float64)
            got = getattr(segments, name)(values, unit)[: len(groups)]
            torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


PREFIXES = {"sum": (prefix_sum, math.fsum), "mean": (prefix_mean, lambda v: math.fsum(v) / len(v))}


@pytest.mark.parametrize("name", PREFIXES)
def test_prefixes_match_a_loop(name):
    ours, of = PREFIXES[name]
    for seed in range(60):
        segments, values, counted, masks = random_case(seed)
        for unit, groups in (("sequence", counted), ("turn", by_turn(values.tolist(), masks))):
            expected = [of(v[: t + 1]) for v in groups for t in range(len(v))]
            got = ours(segments, values, unit)[segments.mask]
            wanted = torch.tensor(expected, dtype=torch.float64)
            torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("unit", ["sequence", "turn"])
@pytest.mark.parametrize("name", PREFIXES)
def test_a_prefix_costs_one_sum_over_ranks(name, unit):
    segments, values, _, _ = random_case(1)
    summed = []

    def all_sum(shares):
        summed.append(shares.shape)
        return identity(shares)

    got = PREFIXES[name][0](replace(segments, all_sum=all_sum), values, unit)
    torch.testing.assert_close(got, PREFIXES[name][0](segments, values, unit), rtol=0, atol=0)
    assert len(summed) == 1


def test_a_broken_value_stays_in_its_prefix():
    values = torch.tensor([1.0, math.inf, 2.0, 3.0, 4.0])
    found = prefix_sum(Segments.whole([3, 2], torch.ones(5)), values)
    assert found.tolist() == [1, math.inf, math.inf, 3, 7]


def test_prefix_minima_match_a_loop():
    for seed in range(60):
        segments, values, _, masks = random_case(seed)
        expected, at = [], 0
        for mask in masks:
            lowest = math.inf
            for m in mask:
                expected.append(lowest)
                lowest = min(lowest, values[at].item()) if m else lowest
                at += 1
        response = torch.where(segments.mask, -values, -math.inf)
        got = prefix_min(segments, values, segments.local_maxima(response))
        assert got.tolist() == expected


def test_turns_are_runs_of_the_mask_inside_one_sequence():
    segments = Segments.whole([3, 4, 0, 1], torch.tensor([0, 1, 1, 1, 0, 1, 1, 1]))
    ids = segments.turn_ids[segments.mask].tolist()
    assert ids == [1, 1, 2, 3, 3, 4] and max(ids) < segments.turn_bound


RNG = random.Random(0)
LENGTHS = [
    (),
    (0,),
    (1,),
    (33, 0, 0, 31),
    (100,),
    (200, 0, 3, 1000, 32, 32, 64, 1),
    (0, 0, 5, 0),
    (1,) * 70,
    *(tuple(RNG.choice((0, 1, 5, 40, 300)) for _ in range(RNG.randint(1, 30))) for _ in range(20)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_local_sums_are_those_of_a_loop(dtype):
    for lengths in LENGTHS:
        rows = [[float(RNG.randint(-9, 9)) for _ in range(sum(lengths))] for _ in range(3)]
        got = Segments.whole(lengths, torch.ones(sum(lengths))).local_sums(torch.tensor(rows, dtype=dtype))
        expected = (
            [[sum(part) for part in torch.tensor(row).split(lengths)] for row in rows] if lengths else []
        )
        assert got.tolist() == [[float(x) for x in row] for row in expected] or not lengths, lengths
        assert got.shape == (3, len(lengths)) and got.dtype is torch.float64


def test_expanding_repeats_a_value_for_each_token():
    for lengths in LENGTHS:
        values = torch.arange(float(len(lengths)))
        expected = [float(i) for i, length in enumerate(lengths) for _ in range(length)]
        assert Segments.whole(lengths, torch.ones(sum(lengths))).expand(values).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int64])
def test_selecting_keeps_every_bit_of_the_selected_and_makes_0_of_all_others(dtype):
    special = [NAN, math.inf, -math.inf, -0.0, 1e-42, -1.5, 3.0] if dtype.is_floating_point else [0, 255]
    values = torch.tensor(special, dtype=dtype)
    for flags in (torch.ones, torch.zeros):
        got = selected(values, flags(len(special), dtype=torch.bool))
        expected = values if flags is torch.ones else torch.zeros_like(values)
        assert got.dtype is dtype and torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_what_is_not_finite_stays_in_its_segment():
    lengths = (70, 40, 300, 1)
    row = torch.ones(sum(lengths))
    row[75] = NAN
    assert Segments.whole(lengths, row).local_sums([row])[0].isnan().tolist() == [False, True, False, False]


def test_flags_are_counted_and_every_row_is_added_as_if_it_were_alone():
    for seed in range(20):
        segments, values, _, _ = random_case(seed)
        values = segments.zeroed(values)
        rows = [values, segments.mask, values.float(), values.float().square()]
        alone = torch.cat([segments.local_sums([row]) for row in rows])
        assert torch.equal(segments.local_sums(rows), alone)
        counts = segments.mask.split(list(segments.lengths))
        assert alone[1].tolist() == [int(flags.sum()) for flags in counts]


def test_a_broken_value_stays_in_its_sequence():
    values = torch.tensor([1.0, NAN, 2.0, 3.0])
    total = Segments.whole([2, 2], torch.ones(4)).sum(values)
    assert total[0].isnan() and total[1] == 5


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_broken_value_makes_the_number_of_its_unit_nan(name):
    """Sequence 0 has two turns, and each sequence after it has one."""
    segments = Segments.whole([3, 2, 1], torch.tensor([1, 0, 1, 1, 1, 1]))
    values = torch.tensor([3.0, NAN, 4.0, 1.0, NAN, 2.0])  # the first NaN is masked
    of_sequences, of_turns = (getattr(segments, name)(values, unit) for unit in ("sequence", "turn"))
    assert of_sequences.isnan().tolist() == [False, True, False]
    assert of_turns[1:5].isnan().tolist() == [False, False, True, False]
    assert of_turns[[1, 2, 4]].tolist() == [3, 4, 2]


@pytest.mark.parametrize("drift", [0.0, -1e-3])
def test_long_float32_sums_stay_within_the_stated_bound(drift):
    torch.manual_seed(0)
    values = torch.randn(131072) * 0.02 + drift
    got = Segments.whole([131072], torch.ones(131072)).sum(values).item()
    exact = math.fsum(values.tolist())
    bound = len(values) * 2**-53 * values.abs().sum().item()
    assert abs(got - exact) < bound < 1e-7


def test_the_mean_has_a_gradient():
    values = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64, requires_grad=True)
    Segments.whole([2, 1], torch.tensor([1, 1, 0])).mean(values).sum().backward()
    assert values.grad.tolist() == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("order", [1, -1], ids=["in order", "out of order"])
def test_the_local_mask_is_the_whole_one_at_the_local_positions(order):
    full_mask = torch.rand(170, generator=torch.Generator().manual_seed(0)) < 0.5
    pieces = ((0, 0, 30, 0), (0, 60, 100, 1), (2, 5, 40, 0), (2, 40, 69, 1))[::order]
    held = Segments((100, 1, 69), pieces, full_mask, 2)
    begins = (0, 100, 101)
    expected = [full_mask[begins[s] + i].item() for s, start, stop, _ in pieces for i in range(start, stop)]
    assert held.mask.tolist() == expected


def test_a_rank_without_tokens_has_an_empty_mask():
    assert Segments((3, 4), (), torch.ones(7, dtype=torch.bool), 2).mask.shape == (0,)


def test_a_rank_of_an_empty_batch_has_an_empty_prefix():
    empty = Segments((), (), torch.zeros(0, dtype=torch.bool), 4)
    assert prefix_sum(empty, torch.zeros(0)).shape == (0,)
