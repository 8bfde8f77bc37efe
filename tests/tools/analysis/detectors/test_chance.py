"""What few samples may do by chance is no finding: ratios of two rollouts, or of two kinds of weights, count
by their standard errors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from slime_ext.tools.analysis.detectors import (
    growing_mismatch,
    length_explosion,
    other_log_probs,
    resumed_wrong_weights,
    stale_weights,
    unexplained,
)
from slime_ext.tools.analysis.detectors.length_explosion import Cuts
from slime_ext.tools.analysis.detectors.shared.ages import older_are_far
from slime_ext.tools.analysis.detectors.shared.exchanged import Exchanged
from slime_ext.tools.analysis.detectors.shared.parts import SURE, FarValue, Mean
from slime_ext.tools.analysis.measures.versions import VersionMeans, VersionSums
from tests.tools.analysis.detectors.toys import (
    LENGTH,
    PROMPTS,
    Policy,
    diagnosed,
    edited,
    findings,
    run,
    sampled,
)


def with_summaries(d, **columns):
    """A diagnosis with other numbers of its rollouts."""
    found = d.rollouts
    d.rollouts = [
        s._replace(**{name: values[i] for name, values in columns.items()}) for i, s in enumerate(found)
    ]
    return d


def with_cuts(d, **columns):
    """A diagnosis with other numbers of the samples that were cut."""
    cuts = d.of(Cuts)
    cuts.rollouts = [
        cut._replace(**{name: values[i] for name, values in columns.items()})
        for i, cut in enumerate(cuts.rollouts)
    ]
    return d


def test_the_error_of_k3_of_some_weights_is_that_of_a_ratio_over_samples():
    rollouts = run(1, samples=16)
    (version,) = diagnosed(rollouts).versions
    k3 = [sum(part) for part in rollouts[0].columns[5].view(16, -1).tolist()]
    lengths = [48] * 16
    mean = sum(k3) / sum(lengths)
    square = sum((k - mean * n) ** 2 for k, n in zip(k3, lengths, strict=True))
    found = VersionMeans.of([version])
    assert found.error == pytest.approx(math.sqrt(square) / sum(lengths), rel=1e-6)
    assert found.relative_error == pytest.approx(found.error / mean, rel=1e-6)


@pytest.mark.parametrize(("error", "is_far"), [(0.1, True), (0.6, False)])
def test_old_weights_are_far_if_more_than_a_few_samples_are(error, is_far):
    d = diagnosed(run(1))
    fresh, stale = VersionSums(0, 1, 1000, 0, 20, 1.0, 0, 0.01), VersionSums(1, 1, 1000, 0, 60, 4.0, 1)
    d.versions = [fresh, stale._replace(square=(4 * error) ** 2)]
    assert (older_are_far(d) is not None) == is_far
    assert (stale_weights.look(d) is not None) == is_far


@pytest.mark.parametrize(
    ("k3", "error", "others_error", "is_sure"),
    [
        (2.0, 0.62, 5e-5, True),  # k3 of 4000 times that of the others, with few large values
        (2.0, 1.2, 5e-5, False),  # of one sample
        (2.0, 0.62, 4e-4, False),  # the others' of one sample
        (2e-3, 6e-4, 5e-5, True),
        (1e-3, 3e-4, 5e-5, False),  # twice that of the others
    ],
)
def test_a_part_is_far_if_its_k3_is_a_multiple_whatever_its_tail(k3, error, others_error, is_sure):
    mine, others = Mean(40, 2000, k3, error), Mean(280, 14000, 5e-4, others_error)
    assert (FarValue("engine", "3", mine, others, (0,), 0.99).z >= SURE) == is_sure


def test_few_others_may_not_show_the_tail_of_a_part():
    """Four far samples of 120: another 8 have none of them three times of four."""
    mine, others = Mean(120, 1920, 0.3, 0.14), Mean(8, 128, 6e-5, 1e-5)
    assert FarValue("status", "truncated", mine, others, (0,), 1.0).z == 0


def test_a_part_beside_others_that_agree_exactly_is_far():
    found = FarValue("engine", "3", Mean(40, 2000, 2.0, 0.62), Mean(280, 14000, 0.0, 0.0), (0,), 1.0)
    assert found.z > 100


GROWS = (0.01, 0.01, 0.01, 0.02, 0.025, 0.03, 0.04, 0.05)


@pytest.mark.parametrize(("error", "is_one"), [(0.05, True), (0.6, False)])
def test_a_distance_grows_if_chance_does_not_make_it(error, is_one):
    d = with_summaries(diagnosed(run(8)), absolute_error=[error] * 8)
    bins = d.rollouts[0].certainty
    d = with_summaries(d, absolute=GROWS, certainty=[[[n, n * a] for n, _ in bins] for a in GROWS])
    d.versions = []
    assert (growing_mismatch.look(d) is not None) == is_one


LENGTHS = (20.0,) + (60.0,) * 7


@pytest.mark.parametrize(("error", "is_one"), [(2.0, True), (8.0, False)])
def test_responses_explode_after_one_rollout_if_its_prompts_do_not_make_it(error, is_one):
    d = with_summaries(diagnosed(run(8)), length=LENGTHS)
    d = with_cuts(d, truncated=[0.0] + [0.7] * 7, length_error=[error] * 8)
    found = length_explosion.look(d)
    assert (found is not None) == is_one
    if found:
        assert found["first"] == 1 and found["severity"] == "warning"


@pytest.mark.parametrize(
    ("shares", "is_one"),
    [
        ((0.12, *(1.0,) * 7), True),
        ((0.12, 0.4, 0.7, 0.9, *(1.0,) * 4), False),  # it rises, and does not jump
        ((0.9, *(1.0,) * 7), False),  # as chance may have it
        ((0.12, *(0.7,) * 7), False),
    ],
)
def test_responses_that_jump_to_the_limit_explode_though_they_cannot_be_much_longer(shares, is_one):
    lengths = (26.0, *(44.0 + i for i in range(7)))
    d = with_summaries(diagnosed(run(8)), length=lengths)
    d = with_cuts(d, truncated=shares, length_error=[8.0] * 8)
    found = length_explosion.look(d)
    assert (found is not None) == is_one
    if found:
        assert found["first"] == 1 and found["cut"] == 1.0


@pytest.mark.parametrize(
    ("error", "prompts", "is_one"), [(1 / 16, 64, True), (1 / 6, 32, False), (1 / 8, 4, True)]
)
def test_answers_that_are_cut_together_count_as_fewer(error, prompts, is_one):
    """The rollout before has 64 samples, half of them cut: binomially, that share has an error of 1/16. Four
    prompts differ as much by chance."""
    lengths = (26.0, *(44.0 + i for i in range(7)))
    d = with_summaries(diagnosed(run(8)), length=lengths, tokens=[64 * int(n) for n in lengths])
    errors = {"length_error": [8.0] * 8, "truncated_error": (error, *(0.0,) * 7)}
    d = with_cuts(d, truncated=(0.5, *(1.0,) * 7), independent=[prompts] * 8, **errors)
    assert (length_explosion.look(d) is not None) == is_one


@pytest.mark.parametrize("together", [True, False])
def test_the_share_that_is_cut_has_an_error_over_prompts(together):
    cut = [(i // (64 // PROMPTS) if together else i) % 2 for i in range(64)]
    rollout = sampled(Policy(), statuses=tuple("truncated" if is_cut else "completed" for is_cut in cut))
    (found,) = diagnosed([rollout]).of(Cuts).rollouts
    shares = [found.truncated] * 2 if not together else [0.0, 1.0]
    assert (found.truncated, found.independent) == (0.5, PROMPTS)
    assert found.truncated_error == pytest.approx(0.5 / math.sqrt(PROMPTS - 1) * (shares[1] - shares[0]))
    (alone,) = diagnosed([edited([rollout], lambda r: {"groups": None})[0]]).of(Cuts).rollouts
    assert (alone.truncated_error, alone.independent) == (pytest.approx(0.5 / math.sqrt(63)), 64)


def test_lengths_of_another_policy_are_a_note():
    policy = Policy()
    other = policy.table + 0.6 * policy.normal(60, 60)
    rollouts = [
        sampled(policy, n, length=12 if n < 2 else 60, statuses=("truncated",) * 64, sampler=other)
        for n in range(8)
    ]
    assert not findings(rollouts)["length_explosion"].is_fault


@pytest.mark.parametrize(("k3", "is_one"), [((0.06, *(0.002,) * 5), True), ((0.06, 0.04, 0.02, 0.01), False)])
def test_wrong_weights_of_a_start_go_with_one_push(k3, is_one):
    k3 = (*k3, *(0.002,) * (6 - len(k3)))
    d = with_summaries(diagnosed(run(6)), k3=k3, k3_error=[0.1] * 6)
    assert (resumed_wrong_weights.look(d) is not None) == is_one


def test_a_distance_that_comes_and_goes_is_no_push_that_lacks_a_part():
    policy, tables, rollouts = Policy(moves=0.1), [], []
    for number, lag in enumerate((0, 0, 2, 0, 3, 1, 3, 0)):
        tables.append(policy.table)
        rollouts.append(sampled(policy, number, sampler=tables[number - lag]))
        policy.step()
    found = findings(rollouts)
    assert set(found) == {"stale_weights"} and found["stale_weights"].or_else == ("rollouts_apart",)
    always = []
    for number in range(8):
        policy.table = tables[number]
        always.append(sampled(policy, number, sampler=tables[max(number - 2, 0)]))
    assert "partial_push" in findings(always)["stale_weights"].or_else


def test_a_number_outside_its_healthy_range_is_never_silent():
    """One sample of 64 makes k3 unhealthy: another draw might not have it, so the finding says so."""

    def one(r):
        at = (r.segments.ids == 7) & (r.rollout_id == 1)
        return {"proximal": torch.where(at, (r.behavior - 2.5), r.proximal)}

    found = unexplained.look(diagnosed(edited(run(), one)))
    assert "k3" in found["outside"][0] and "perhaps by chance" in found["outside"][0]
    assert unexplained.look(diagnosed(run())) is None


@pytest.mark.parametrize(
    ("k3", "ratio_squared", "fresh_k3", "is_recorded", "severity"),
    [
        (1e-3, 1.002, 1.0, True, "note"),
        (1e-3, 1.3, 1.0, True, None),
        (2e-2, 1.04, 1.0, True, "note"),
        (2e-2, 1.04, 6.0, True, None),
        (2e-2, 1.04, 1.0, False, None),
    ],
)
def test_old_weights_are_a_note_while_every_number_is_healthy(
    k3, ratio_squared, fresh_k3, is_recorded, severity
):
    """k3 of a recorded lag is what its ages make, unless that of fresh weights is unhealthy as well.

    chi^2 is 0.3 in the second case, of few large ratios. Without versions k3 itself must be healthy.
    """
    d = diagnosed(run(1))
    fresh, stale = VersionSums(0, 1, 1000, 0, 20, fresh_k3), VersionSums(1, 1, 1000, 0, 60, 40.0, 1)
    d.versions, count = [fresh, stale], d.sums.finite
    d.rollouts = [s._replace(version=1 if is_recorded else -1) for s in d.rollouts]
    d.sums = replace(d.sums, k3=k3 * count, ratio=float(count), ratio_squared=ratio_squared * count)
    assert stale_weights.look(d).get("severity") == severity


@pytest.mark.parametrize(
    ("which", "is_fault"), [((0,), False), ((0, 1), False), ((2,), True), ((0, 2), True), ((1, 2), True)]
)
def test_engines_that_are_bitwise_alike_until_something_changes_are_no_copy(which, is_fault):
    def edit(r):
        # In the first of two rollouts the last bits of some tokens differ.
        is_odd = (r.rollout_id < which[-1]) & (r.segments.within == LENGTH - 1)
        copy = torch.where(is_odd, r.behavior - 1e-6, r.behavior)
        return {"proximal": copy if r.rollout_id in which else r.proximal}

    found = findings(edited(run(), edit))
    assert set(found) == {"equal_columns"} and found["equal_columns"].is_fault == is_fault


@pytest.mark.parametrize(("left", "is_found"), [(0.05, True), (0.15, False)])
def test_what_fits_another_sample_no_better_than_the_best_of_many_by_chance_is_no_finding(left, is_found):
    """Every sample is far off, so a seventh of k3 is no more than three times that of the nearest ones."""
    policy = Policy()
    d = diagnosed(run(policy=policy, sampler=policy.table + 1.5 * policy.normal(60, 60)))
    before, tokens = 1000.0, 150.0
    sums = torch.tensor([4, tokens, before, (1 - left) * before, 3e5], dtype=torch.float64)
    places = torch.tensor([4.0, 0, 0], dtype=torch.float64)
    d.measures["Exchanged"] = Exchanged(tried=4, places=places, sums=sums, apart=before)
    assert (other_log_probs._exchanged(d) is not None) is is_found


def test_no_other_weights_sampled_rollouts_in_which_only_some_prompts_are_far():
    """Rollout 0 is further off, but as later ones only at a quarter of its prompts."""
    policy = Policy()
    noise = policy.normal(60)

    def far(r):
        is_far = (r.segments.expand(torch.tensor(r.groups)) % 4 == 0).double()
        return {"proximal": r.proximal + (0.6 if r.rollout_id == 0 else 0.15) * is_far * noise[r.tokens]}

    found = findings(edited(run(6), far))
    assert "some_prompts" in found and "resumed_wrong_weights" not in found
