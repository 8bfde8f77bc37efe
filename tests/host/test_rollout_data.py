"""A sample is found by the identity of its loss mask, and by nothing else; what the samples of one rollout or
one prompt mean for each other, on tables whose answers can be read off."""

from __future__ import annotations

import gc
import math
import statistics

import pytest
import torch

from slime_ext.core.correction import Correction
from slime_ext.core.steps import Reject, SecondMoment
from slime_ext.errors import NonFiniteError
from slime_ext.host import rollout_data
from slime_ext.host.rollout_data import Record, SampleRow
from slime_ext.host.step_metrics import NonFiniteTracker
from slime_ext.host.step_plan import what_couples
from slime_ext.ops.segments import Segments


def data(count=3, **more):
    return {"loss_masks": [torch.ones(4, dtype=torch.int32) for _ in range(count)], **more}


@pytest.fixture(autouse=True)
def clean():
    yield
    rollout_data.remember_samples({"loss_masks": []})


def test_a_hook_call_finds_its_samples_in_any_order():
    rollout = data(sample_indices=[10, 11, 12])
    rollout_data.remember_samples(rollout)
    found = rollout_data.samples_of([rollout["loss_masks"][2], rollout["loss_masks"][0]])
    assert found == [(2, 12), (0, 10)]


def test_an_equal_mask_is_another_sample():
    rollout = data()
    rollout_data.remember_samples(rollout)
    assert rollout_data.samples_of([rollout["loss_masks"][0].clone()]) is None


def test_a_rollout_forgets_the_one_before():
    before, after = data(), data()
    rollout_data.remember_samples(before)
    rollout_data.remember_samples(after)
    assert rollout_data.samples_of(before["loss_masks"]) is None
    assert rollout_data.samples_of(after["loss_masks"]) is not None


def test_a_mask_that_is_gone_is_not_mistaken_for_one_at_its_address():
    rollout = data(1)
    rollout_data.remember_samples(rollout)
    address = id(rollout["loss_masks"][0])
    rollout.clear()
    gc.collect()
    others = [torch.ones(4, dtype=torch.int32) for _ in range(64)]
    assert all(rollout_data.samples_of([mask]) is None for mask in others), address in map(id, others)


def test_records_take_what_the_release_fills_in():
    for more, index in (({}, None), ({"sample_indices": torch.tensor([4])}, 4), ({"sample_indices": [7]}, 7)):
        rollout = data(1, **more)
        rollout_data.remember_samples(rollout)
        (record,) = rollout_data.samples_of(rollout["loss_masks"])
        assert record == (0, index)


def test_a_broken_sample_is_named_by_its_index_where_the_host_keeps_one():
    for records, name in (
        ([Record(0, 6), Record(1, 7)], r"sample 7 \(sequence 1 of 2 in micro-batch 0\)"),
        ([Record(0), Record(1)], "sequence 1 of 2 in micro-batch 0"),
        (None, "sequence 1 of 2 in micro-batch 0"),
    ):
        tracker = NonFiniteTracker()
        broken = torch.tensor([0.0, 0.0, math.nan])
        tracker.look({"train_log_probs": broken}, Segments.whole([1, 2], torch.ones(3)), records)
        with pytest.raises(NonFiniteError, match=f"^train_log_probs, {name}, response token 1: "):
            tracker.check([tracker.vector().tolist()], 0)


NAN = math.nan
REJECTS = (Reject(high=2.0),)


def row(*, rollout=0, group=0, step=0, tokens=10, kept=10, denominator=10, reward=0.0):
    return SampleRow(rollout, group, step, tokens, kept, denominator, reward)


def rewarded(rewards, rejected=()):
    """One group; a second one, of which nothing is rejected, gets no advantages."""
    rows = [row(kept=0 if i in rejected else 10, reward=r) for i, r in enumerate(rewards)]
    return [*rows, row(group=1, reward=5.0)]


def test_a_sample_is_rejected_when_it_has_tokens_and_keeps_none():
    for tokens, kept, rejected in ((10, 0, True), (10, 1, False), (0, 0, False), (1, 0, True)):
        rows = [row(group=3, tokens=tokens, kept=kept), row(group=4)]
        assert rollout_data.broken_groups(rows) == ({3} if rejected else set())


def test_nothing_is_kept_of_a_broken_group():
    rows = [row(group=3), row(group=4)]
    assert [r.kept for r in rollout_data.without_groups(rows, {3})] == [0, 10]


def test_a_rollout_is_divided_by_what_all_its_samples_keep():
    rows = [row(kept=2, denominator=20), row(kept=3, denominator=20), row(rollout=1, kept=0, denominator=7)]
    assert rollout_data.rollout_factors(rows) == [4.0, 4.0, 1.0]


def test_an_optimizer_step_is_divided_by_what_it_keeps():
    rows = [row(tokens=9, kept=5), row(tokens=0, kept=0), row(step=1, tokens=4, kept=0)]
    assert rollout_data.token_factors(rows) == [2.0, 2.0, 1.0]  # 9 tokens, and 1 for the sample without any


def test_a_rejected_sample_leaves_the_baseline_of_its_group():
    for by_std in (False, True):
        found = rollout_data.rebaselined(rewarded([1.0, 3.0, 2.0, 100.0, NAN], rejected=[3]), by_std=by_std)
        scale = statistics.stdev([1.0, 3.0, 2.0]) + 1e-6 if by_std else 1
        assert found == [pytest.approx(x / scale) for x in (-1.0, 1.0, 0.0)] + [0.0, 0.0, None]


def test_of_one_sample_alone_nothing_is_learned():
    for by_std in (False, True):
        for rejected in ([1], [0, 1]):
            assert rollout_data.rebaselined(rewarded([1.0, 3.0], rejected), by_std=by_std) == [0.0, 0.0, None]


def test_messages_name_the_keys_that_couple_samples():
    for fields, keys in (
        ({"steps": (SecondMoment(),)}, "second_moment"),
        ({"steps": REJECTS, "denominator": "kept"}, "denominator: kept"),
        ({"steps": (*REJECTS, SecondMoment()), "group": "atomic"}, "second_moment, group: atomic"),
    ):
        assert what_couples(Correction(**fields)) == keys
