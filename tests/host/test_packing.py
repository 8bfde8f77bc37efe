"""slime's slices and lists <-> flat tensors: what each rank holds, what comes back, what is refused."""

from __future__ import annotations

import math
import random
import sys
from argparse import Namespace
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

from slime_ext.core.correction import Correction
from slime_ext.errors import ConfigError, DataError, NonFiniteError
from slime_ext.host.packing import locate, pack, pack_segments, require_usable, unpack_masks
from slime_ext.host.ranks import ALONE, Parallel, context_parallel
from slime_ext.hosts.contract import HookCall
from slime_ext.hosts.slices import zigzag
from slime_ext.ops.segments import Segments
from tests.slices import slice_response

# total, response; slime always has a prompt, so the first response token has a logit before it
SHAPES = [(12, 7), (9, 1), (18, 12), (8, 5), (31, 3), (6, 5), (3, 0), (40, 39)]


def by_hand(total, response, rank, size, padded=None):
    """Response positions of a rank: the token at position p is predicted at p - 1, which chunk holds that?"""
    chunk = -(-(padded or total) // (2 * size))
    prompt = total - response
    held = [r for r in range(response) if (prompt + r - 1) // chunk == rank]
    return held + [r for r in range(response) if (prompt + r - 1) // chunk == 2 * size - 1 - rank]


def test_zigzag_slices_match_their_definition():
    for size in (1, 2, 3, 4):
        for total, response in SHAPES:
            for rank in range(size):
                (a, b), (c, d) = zigzag(total, response, rank, size)
                assert [*range(a, b), *range(c, d)] == by_hand(total, response, rank, size)


def test_padded_sequences_are_cut_where_their_padding_says():
    for size, padded in ((2, 48), (2, 97), (3, 40)):
        masks = [torch.ones(response) for _, response in SHAPES]
        totals, responses = map(list, zip(*SHAPES, strict=True))
        seen = []
        for rank in range(size):
            held = [by_hand(t, r, rank, size, padded) for t, r in SHAPES]
            padded_lengths = [padded] * len(SHAPES)
            segments = pack_segments(masks, totals, responses, padded_lengths, Parallel(rank, size))
            begins = accumulate(responses, initial=0)
            wanted = [b + i for b, part in zip(begins, held, strict=False) for i in part]
            assert segments.positions.tolist() == wanted
            seen += wanted
        assert sorted(seen) == list(range(sum(responses)))


def test_the_slices_of_all_ranks_cover_every_token_once():
    for size in (2, 4):
        for total, response in SHAPES:
            values = list(range(response))
            parts = [slice_response(values, total, response, rank, size) for rank in range(size)]
            assert sorted(x for part in parts for x in part) == values


def test_slices_of_lists_and_tensors_agree():
    values = list(range(12))
    tensor = slice_response(torch.tensor(values), 18, 12, 1, 2)
    assert tensor.tolist() == slice_response(values, 18, 12, 1, 2)
    assert slice_response(values, 18, 12, 0, 1) is values


def test_local_masks_and_positions_are_the_slices():
    for rank in (0, 1):
        rng = random.Random(0)
        masks = [torch.tensor([rng.randint(0, 1) for _ in range(r)], dtype=torch.int32) for _, r in SHAPES]
        totals, responses = map(list, zip(*SHAPES, strict=True))
        segments = pack_segments(masks, totals, responses, here=Parallel(rank, 2))
        begins = [0, *accumulate(responses)]
        held = [slice_response(list(range(r)), t, r, rank, 2) for t, r in SHAPES]
        assert segments.positions.tolist() == [
            b + i for b, part in zip(begins, held, strict=False) for i in part
        ]
        assert segments.ids.tolist() == [s for s, part in enumerate(held) for _ in part]
        assert torch.equal(segments.mask, torch.cat(masks)[segments.positions] != 0)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shards_have_their_numbers_in_the_order_of_their_tokens(size):
    """Sums over what comes before a token go by these numbers."""
    totals, responses = map(list, zip(*SHAPES, strict=True))
    masks = [torch.ones(response) for response in responses]
    ranks = [pack_segments(masks, totals, responses, here=Parallel(rank, size)) for rank in range(size)]
    for sequence, response in enumerate(responses):
        shards = sorted(
            (number, start, stop)
            for rank in ranks
            for i, start, stop, number in rank.local_shards
            if i == sequence
        )
        assert [number for number, _, _ in shards] == list(range(2 * size))
        tokens = [token for _, start, stop in shards for token in range(start, stop)]
        assert tokens == list(range(response))


@pytest.mark.parametrize(("initialized", "size"), [(False, None), (True, 1)])
def test_a_process_that_shares_no_sequence_is_alone(initialized, size, monkeypatch):
    state = SimpleNamespace(
        model_parallel_is_initialized=lambda: initialized, get_context_parallel_world_size=lambda: size
    )
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    assert context_parallel() == ALONE


def hook_call(**changes):
    fields = {
        "pg_loss": torch.zeros(3),
        "train_log_probs": [torch.zeros(2), torch.zeros(1)],
        "rollout_log_probs": [torch.zeros(2), torch.zeros(1)],
        "loss_masks": [torch.ones(2), torch.ones(1)],
        "total_lengths": [4, 3],
        "response_lengths": [2, 1],
    }
    return HookCall.of(None, fields | changes)


def test_advantages_may_be_one_tensor():
    assert pack(hook_call(advantages=torch.arange(3.0))).advantages.tolist() == [0, 1, 2]
    assert pack(hook_call(advantages=[torch.zeros(2), torch.ones(1)])).advantages.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_log_probs": [torch.zeros(2)]}, "train_log_probs: expected 2 samples, got 1"),
        ({"loss_masks": [torch.ones(2), torch.ones(2)]}, "loss_masks, sequence 1 of 2: expected 1 tokens"),
        (
            {"advantages": torch.zeros(2)},
            r"advantages: expected 3 tokens on this rank, got a tensor of shape \[2\]",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(changes, message):
    with pytest.raises(DataError, match=message):
        pack(hook_call(**changes))


def test_padding_that_the_host_does_not_pass_is_named():
    call = replace(hook_call(), args=Namespace(qkv_format="bshd"))
    assert pack(call).segments.size == 3  # of one rank nothing is cut
    with pytest.raises(ConfigError, match=r"max_seq_lens: expected the padded .* got none: add --cust"):
        pack(call, Parallel(rank=0, size=2))


def test_full_lists_under_context_parallel_are_refused():
    with pytest.raises(DataError, match="same context-parallel slice"):
        pack(hook_call(), Parallel(rank=0, size=2))


def test_reduced_masks_keep_dtype_and_leave_the_hosts_alone():
    masks = [torch.tensor([1, 0, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)]
    segments = Segments.whole([3, 1], torch.cat(masks))
    reduced = unpack_masks(torch.tensor([False, False, True, True]), masks, segments)
    assert [m.tolist() for m in reduced] == [[0, 0, 1], [1]] and reduced[0].dtype == torch.int32
    assert masks[0].tolist() == [1, 0, 1]


def test_a_local_index_is_located_in_its_response():
    segments = pack_segments([torch.ones(7), torch.ones(12)], [12, 18], [7, 12], here=Parallel(1, 2))
    places = [locate(i, segments) for i in range(segments.size)]
    assert places == [
        (int(s), int(p) - 7 * int(s)) for s, p in zip(segments.ids, segments.positions, strict=True)
    ]


def test_each_quantity_keeps_its_dtype():
    lengths = [5, 0, 3]
    proximal, behavior = (
        [-torch.rand(n).to(dtype) for n in lengths] for dtype in (torch.float32, torch.bfloat16)
    )
    masks = [torch.ones(n, dtype=torch.int32) for n in lengths]
    packed = pack(HookCall(None, torch.zeros(8), proximal, behavior, masks, lengths, lengths))
    for values, found in ((proximal, packed.proximal), (behavior, packed.behavior)):
        assert torch.equal(found, torch.cat(values)) and found.dtype is values[0].dtype


OF_TRAINER = ("train_log_probs", "a finite log-prob", {math.nan, math.inf, -math.inf})
OF_BEHAVIOR = (
    "rollout_log_probs",
    "a log-prob above -1000 and at most 0",
    {math.nan, math.inf, -math.inf, 0.7, 3e38, -9999.0, -1000.0},
)


@pytest.mark.parametrize(
    ("name", "wanted", "refused"), [OF_TRAINER, OF_BEHAVIOR], ids=["trainer", "behavior"]
)
def test_a_value_that_cannot_be_used_is_named_unless_it_is_masked(name, wanted, refused):
    for value in (math.nan, math.inf, -math.inf, 0.7, 3e38, -9999.0, -1000.0, -999.0, 0.0):
        values = torch.tensor([-1.0, -2.0, -1.0, value, -1.0])
        masked = Segments.whole([2, 3], torch.tensor([1, 1, 1, 0, 1]))
        require_usable(name, values, masked, "stop")
        every = Segments.whole([2, 3], torch.ones(5))
        if value not in refused and not math.isnan(value):
            require_usable(name, values, every, "stop")
            continue
        with pytest.raises(NonFiniteError) as caught:
            require_usable(name, values, every, "stop")
        assert str(caught.value) == (
            f"{name}, sequence 1 of 2, response token 1: expected {wanted}, got {values[3].item()}: stop"
        )


def test_log_probs_whose_sum_is_beyond_float32_are_finite():
    require_usable("train_log_probs", torch.tensor([3e38, 3e38]), Segments.whole([2], torch.ones(2)), "stop")


def test_a_hook_call_reads_as_log_probs_only_what_is_one():
    """Rounding may leave one a little above 0. A probability of 2 is a broken engine's, and -9999.0 is what a
    server writes for minus infinity: both are rejected like NaN."""
    masks = [torch.ones(3, dtype=torch.int32), torch.ones(2, dtype=torch.int32)]
    for other in (torch.inf, torch.nan, -9999.0, -1000.0, 0.02, -999.0, -1.0, 0.0099):
        given = [torch.tensor([-1.0, 1e-4, 0.7]), torch.tensor([other, 0.0])]
        packed = pack(HookCall(None, torch.zeros(5), given, given, masks, [3, 2], [3, 2]))
        read = Correction().read(packed)
        assert read.finite.tolist() == [True, True, False, other in (-999, -1, 0.0099), True]
        assert torch.equal(packed.proximal.nan_to_num(), torch.cat(given).nan_to_num())


@pytest.mark.parametrize(("value", "is_one"), [(0.0, True), (0.0099, True), (0.0101, False), (0.2, False)])
def test_what_rounding_leaves_above_zero_ends_at_a_hundredth(value, is_one):
    given = [torch.tensor([-1.0, value]), torch.tensor([-2.0])]
    masks = [torch.ones(2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)]
    packed = pack(HookCall(None, torch.zeros(3), given, given, masks, [4, 3], [2, 1]))
    assert Correction().read(packed).finite.tolist() == [True, is_one, True]
