"""How a rollout is cut: everything once, nothing lost, the right token behind every logit."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from slime_ext.launcher.megatron.batching import Layout, micro_batches, pack_micro_batch, step_slices
from tests.launcher.megatron.tiny_model import slice_for_rank
from tests.launcher.megatron.tiny_rollout import rollout


def arguments(**more):
    return Namespace(**{"ppo_n_minibatches": 1, "micro_batch_size": 3, **more})


@pytest.mark.parametrize("more", [{}, {"micro_batch_size": 12}, {"ppo_n_minibatches": 2}])
@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_every_sample_is_in_one_micro_batch_of_one_rank(more, dp_size):
    cuts = [micro_batches(arguments(**more), range(12), r, dp_size) for r in range(dp_size)]
    flat = sorted(p for rank in cuts for minibatch in rank for batch in minibatch for p in batch)
    assert flat == list(range(12))
    assert len({tuple(len(minibatch) for minibatch in rank) for rank in cuts}) == 1


def test_steps_follow_the_rollout_order():
    assert step_slices(6, 2) == [range(0, 2), range(2, 4), range(4, 6)]


def whole_logits(samples):
    """Fake logits that name (sample, position), by sample."""
    return [[100 * i + p for p in range(s.total_length)] for i, s in enumerate(samples)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_response_token_meets_the_logit_before_it(size):
    samples = rollout(8)
    seen: dict[int, list[int]] = {}
    for rank in range(size):
        batch = pack_micro_batch(samples, Layout(cp_rank=rank, cp_size=size))
        local = torch.tensor([x for row in whole_logits(samples) for x in slice_for_rank(row, rank, size)])
        rows = batch.split(local[batch.logit_rows])
        for i, (row, targets) in enumerate(zip(rows, batch.split(batch.targets), strict=True)):
            seen.setdefault(i, []).extend(zip(row.tolist(), targets.tolist(), strict=True))
    for i, s in enumerate(samples):
        first = s.total_length - s.response_length
        expected = [(100 * i + p - 1, s.tokens[p]) for p in range(first, s.total_length)]
        assert sorted(seen[i]) == expected


@pytest.mark.parametrize("size", [1, 2, 3])
def test_packed_tokens_are_megatrons_zigzag(size):
    samples = rollout(5)
    for rank in range(size):
        batch = pack_micro_batch(samples, Layout(cp_rank=rank, cp_size=size))
        expected = [t for s in samples for t in slice_for_rank(s.tokens, rank, size)]
        assert batch.input_ids.tolist() == [expected]
        assert int(batch.packed_seq_params.cu_seqlens_q[-1]) == len(expected) * size


def test_unknown_versions_are_minus_one():
    samples = rollout(2)
    samples[0].token_weight_versions = ["3"] * samples[0].response_length
    batch = pack_micro_batch(samples, Layout())
    assert [v.tolist() for v in batch.split(batch.versions)] == [[3] * samples[0].response_length, [-1]]
