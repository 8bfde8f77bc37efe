"""A sample is found by the identity of its loss mask, and by nothing else; what the samples of one rollout or
one prompt mean for each other, on tables whose answers can be read off."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from slime_ext.core.correction import Correction
from slime_ext.core.steps import Reject, SecondMoment
from slime_ext.errors import NonFiniteError
from slime_ext.host import rollout_data
from slime_ext.host.rollout_data import SampleRow, Samples
from slime_ext.host.step_metrics import NonFiniteTracker
from slime_ext.host.step_plan import what_couples
from slime_ext.ops.segments import Segments


def samples(count=3, **more):
    return Samples.of({"loss_masks": [torch.ones(4, dtype=torch.int32) for _ in range(count)], **more})


def test_a_hook_call_finds_its_samples_in_any_order():
    step = samples(sample_indices=[10, 11, 12])
    places = step.places([step.masks[2], step.masks[0]])
    assert places == [2, 0] and [step.indices[place] for place in places] == [12, 10]


def test_an_equal_mask_is_another_sample():
    step = samples()
    assert step.places([step.masks[0].clone()]) is None is step.places([step.masks[0], torch.ones(4)])


def test_indices_are_what_the_release_fills_in():
    for more, index in (({}, None), ({"sample_indices": torch.tensor([4])}, 4), ({"sample_indices": [7]}, 7)):
        assert samples(1, **more).indices == [index]


def test_the_samples_of_other_steps_are_the_rest():
    rollout = {"loss_masks": [torch.ones(4) for _ in range(4)], "rewards": [0.0, 1.0, 2.0, 3.0]}
    taken = {key: values[1:3] for key, values in rollout.items()}
    rest = rollout_data.rest_of(rollout, taken)
    assert rest["rewards"] == [0.0, 3.0] and rest["log_probs"] is None
    assert rollout_data.rest_of(rollout, rollout)["rewards"] == []


def test_a_broken_sample_is_named_by_its_index_where_the_host_keeps_one():
    for records, name in (
        ([6, 7], "sample 7, sequence 1 of 2 in micro-batch 0"),
        ([None, None], "sequence 1 of 2 in micro-batch 0"),
        ([], "sequence 1 of 2 in micro-batch 0"),
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


def test_a_rollout_is_divided_by_what_all_its_samples_keep():
    rows = [row(kept=2, denominator=20), row(kept=3, denominator=20), row(rollout=1, kept=0, denominator=7)]
    assert rollout_data.factors(rows) == [4.0, 4.0, 1.0]


def test_an_optimizer_step_is_divided_by_what_it_keeps():
    rows = [row(tokens=9, kept=5), row(tokens=0, kept=0), row(step=1, tokens=4, kept=0)]
    assert rollout_data.factors(rows, per_token=True) == [
        2.0,
        2.0,
        1.0,
    ]  # 9 tokens, and 1 for the sample without any


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
