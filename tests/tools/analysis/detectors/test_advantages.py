"""Advantages that do not follow from the rewards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.tools.analysis.detectors.toys import LENGTH, Policy, edited, findings, run, sampled

SIZE = 8  # samples of a prompt


def centred(rewards, size=SIZE):
    rows = rewards.view(-1, size)
    return (rows - rows.mean(1, keepdim=True)).flatten()


def strided(rewards):
    """Centred over samples that are a group's length apart."""
    rows = rewards.view(SIZE, -1)
    return (rows - rows.mean(0)).flatten()


def scaled(rewards):
    deviation = centred(rewards).view(-1, SIZE).std(1).repeat_interleave(SIZE)
    return centred(rewards) / (deviation + 1e-6)


def by_others(rewards):
    """Centred and divided over the other samples of the prompt."""
    rows = rewards.view(-1, SIZE)
    others = [torch.cat([rows[:, :i], rows[:, i + 1 :]], 1) for i in range(SIZE)]
    mean, deviation = (torch.stack([f(other, 1) for other in others], 1) for f in (torch.mean, torch.std))
    return ((rows - mean) / (deviation + 1e-6)).flatten()


def with_advantages(made):
    return edited(run(), lambda r: {"advantages": made(r.rewards).repeat_interleave(LENGTH).float()})


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda rewards: -centred(rewards), "sign is flipped"),
        (lambda rewards: centred(rewards).roll(1), "one sample late"),
        (lambda rewards: centred(rewards).roll(-1), "one sample early"),
        (
            lambda rewards: centred(rewards.view(SIZE, -1).T.flatten()).view(-1, SIZE).T.flatten(),
            "other prompts",
        ),
        (lambda rewards: torch.where(rewards > 0, torch.nan, rewards), "NaN or infinite"),
    ],
)
def test_what_advantages_follow_from_is_said(made, said):
    found = findings(with_advantages(made))
    assert set(found) == {"advantages"} and said in found["advantages"].title


@pytest.mark.parametrize(
    "made",
    [
        centred,
        lambda rewards: (
            centred(rewards) / (centred(rewards).view(-1, SIZE).std(1).repeat_interleave(SIZE) + 1e-6)
        ),
        lambda rewards: rewards - rewards.mean(),  # REINFORCE++: one baseline for the batch
        lambda rewards: (rewards - rewards.mean()) / rewards.std(),
    ],
)
def test_what_estimators_make_of_rewards_is_no_fault(made):
    assert findings(with_advantages(made)) == {}


@pytest.mark.parametrize(("made", "is_blown"), [(by_others, True), (scaled, False), (centred, False)])
def test_advantages_that_are_divided_by_nearly_0_are_named(made, is_blown):
    """One sample of the first prompt has another reward, and rewards have a range of 200."""

    def odd(r):
        rewards = 200 * r.rewards
        rewards[:SIZE] = torch.eye(SIZE, dtype=rewards.dtype)[0]
        return {"rewards": rewards, "advantages": made(rewards).repeat_interleave(LENGTH).float()}

    found = findings(edited(run(), odd))
    assert set(found) == ({"advantages"} if is_blown else set())
    assert not is_blown or "divided by nearly 0" in found["advantages"].title


def test_one_baseline_for_the_batch_is_a_fault_under_an_estimator_that_has_one_by_prompt():
    rollouts = with_advantages(lambda rewards: rewards - rewards.mean())
    found = findings(rollouts, advantage_estimator="grpo")
    assert set(found) == {"advantages"} and "over the whole batch" in found["advantages"].title


BY_PADS = "one number is subtracted for all prompts"  # mean of a batch whose fourth part is pads


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda rewards: rewards, "nothing is subtracted"),
        (lambda rewards: 3 * rewards, "nothing is subtracted"),
        (lambda rewards: (rewards - 0.6 * rewards.mean()) / rewards.std(), BY_PADS),
        (centred, ""),
        (scaled, ""),
        (lambda rewards: (centred(rewards) - 0.1) / rewards.std(), ""),  # whitened over tokens
    ],
)
def test_one_baseline_for_all_prompts_is_a_fault_under_an_estimator_that_has_one_by_prompt(made, said):
    rollouts = with_advantages(made)
    found = findings(rollouts, advantage_estimator="grpo", rewards_normalization=True)
    assert set(found) == ({"advantages"} if said else set())
    assert not said or said in found["advantages"].title
    asked = {"rewards_normalization": False}, {"custom_advantage_function_path": "mine.advantages"}
    for flags in ({}, *({"advantage_estimator": "grpo"} | one for one in asked)):
        assert findings(rollouts, **flags) == {}


@pytest.mark.parametrize("of_all", [True, False])
@pytest.mark.parametrize("stays", [True, False])
def test_the_mean_of_a_prompt_may_be_over_samples_that_do_not_train(of_all, stays):
    """Half of the samples of each prompt are right; some wrong ones are masked out, or not in the dump."""

    def trained(r):
        rewards, number = (torch.arange(64) % 2).double(), torch.arange(64)
        is_kept = (rewards > 0) | (number % SIZE < 2 * (number // SIZE % 3))
        inside = torch.where(is_kept, rewards, torch.nan).view(-1, SIZE).nanmean(1).repeat_interleave(SIZE)
        advantages = (centred(rewards) if of_all else rewards - inside).repeat_interleave(LENGTH).float()
        changed = replace(r, rewards=rewards, advantages=advantages)
        return masked(changed, is_kept) if stays else without(changed, is_kept)

    assert findings([trained(r) for r in run()], advantage_estimator="grpo") == {}


def masked(r, is_kept):
    return replace(r, mask=is_kept.repeat_interleave(LENGTH))


def without(r, is_kept):
    tokens = ("behavior", "proximal", "mask", "tokens", "advantages", "versions")
    samples = ("lengths", "prompt_lengths", "positions", "groups", "statuses")
    kept = {name: getattr(r, name)[is_kept.repeat_interleave(LENGTH)] for name in tokens}
    kept |= {name: tuple(x for x, k in zip(getattr(r, name), is_kept, strict=True) if k) for name in samples}
    return replace(r, rewards=r.rewards[is_kept], **kept)


def test_advantages_of_0_are_an_error_where_rewards_differ_and_a_warning_where_they_do_not():
    found = findings(with_advantages(torch.zeros_like))
    assert found["no_advantage"].severity == "error"
    flat = edited(run(), lambda r: {"rewards": torch.ones(64).double(), "advantages": 0 * r.advantages})
    assert findings(flat)["no_advantage"].severity == "warning"


def test_advantages_of_0_at_a_part_of_the_tokens_are_named():
    """One mask for all samples: a token-level estimator has other numbers, and hardly ever 0."""

    def last(r):
        return {"advantages": torch.where(r.segments.within >= 30, r.advantages, 0)}

    found = findings(edited(run(), last))
    assert set(found) == {"advantages"} and "0 at a part of the response tokens" in found["advantages"].title
    g = torch.Generator().manual_seed(0)
    assert findings(edited(run(), lambda r: {"advantages": torch.randn(r.size, generator=g)})) == {}


def test_log_probs_that_stay_those_of_the_first_policy_are_named():
    found = findings(edited(run(), lambda r: {"reference": r.proximal.clone()}))
    assert set(found) == {"equal_reference"}
    assert findings(edited(run(), lambda r: {"reference": r.proximal + 0.01})) == {}


@pytest.mark.parametrize(
    ("replaced", "flags", "severity"),
    [
        ({2}, {"kl_coef": 0.0}, "warning"),
        ({2}, {}, "note"),
        ({2}, {"ref_update_interval": 2}, None),
        ({0, 1}, {"kl_coef": 0.0}, None),  # the policy has not moved yet
        (set(), {"kl_coef": 0.0}, None),
    ],
)
def test_a_reference_that_becomes_the_policy_of_a_later_rollout_is_named(replaced, flags, severity):
    def referred(r):
        return {"reference": r.proximal if r.rollout_id in replaced else r.proximal + 0.01}

    found = findings(edited(run(), referred), **flags)
    assert {name: one.severity for name, one in found.items()} == (
        {"equal_reference": severity} if severity else {}
    )
    assert not severity or "replaced by the trainer's in rollout 2" in found["equal_reference"].title


def test_responses_that_become_several_times_as_long_are_named():
    policy = Policy()
    for step, status, is_one in [(16, "completed", True), (8, "truncated", True), (8, "completed", False)]:
        rollouts = [
            sampled(policy, number, length=12 + step * number, statuses=(status,) * 64) for number in range(9)
        ]
        assert set(findings(rollouts)) == ({"length_explosion"} if is_one else set()), (step, status)


def test_the_rollout_from_which_on_responses_are_long_is_named():
    policy = Policy()
    rollouts = [
        sampled(policy, number, length=12 if number < 2 else 60, statuses=("truncated",) * 64)
        for number in range(8)
    ]
    found = findings(rollouts)
    assert set(found) == {"length_explosion"} and "before rollout 2," in found["length_explosion"].evidence


def normalised(r, ranks):
    """Advantages of which each rank has normalised those of its tokens."""
    values = r.advantages.double()
    for rank in ranks.unique():
        here = ranks == rank
        values[here] = (values[here] - values[here].mean()) / values[here].std()
    return {"advantages": values.float()}


def of_lengths(rollouts, length_of):
    """The rollouts with shorter responses."""

    def cut(r):
        lengths = [length_of(i) for i in range(len(r.lengths))]
        keep = torch.cat([torch.arange(LENGTH) < n for n in lengths])
        rows = ("behavior", "proximal", "mask", "tokens", "advantages", "versions")
        return {name: getattr(r, name)[keep] for name in rows} | {"lengths": tuple(lengths)}

    return edited(rollouts, cut)


def chunk_ranks(r, cp, with_prompt):
    """The context-parallel rank of each token: a text is padded to 2 cp equal chunks, 0 1 1 0 for two."""
    order = [*range(cp), *reversed(range(cp))]
    ranks = []
    for length, prompt in zip(r.lengths, r.prompt_lengths, strict=True):
        size = length + prompt * with_prompt
        each = -(-size // (2 * cp))
        ranks += [order[at // each] for at in range(size - length, size)]
    return torch.tensor(ranks)


@pytest.mark.parametrize(("cp", "with_prompt"), [(2, True), (2, False), (4, True), (8, False)])
def test_advantages_that_each_context_parallel_rank_normalised_are_named(cp, with_prompt):
    rollouts = of_lengths(run(), lambda i: 20 + (7 * i) % 29)
    found = findings(edited(rollouts, lambda r: normalised(r, chunk_ranks(r, cp, with_prompt))))
    assert set(found) == {"advantages"} and "context-parallel ranks normalise" in found["advantages"].title
    whole = edited(rollouts, lambda r: normalised(r, torch.zeros(r.size).long()))
    assert "advantages" not in findings(whole)


def test_advantages_that_each_data_parallel_rank_normalised_are_named():
    ranks = tuple(i % 2 for i in range(64))
    rollouts = of_lengths(run(), lambda i: 20 + (7 * i) % 29)

    def by_rank(r):
        return normalised(r, torch.tensor(ranks)[r.segments.ids.long()]) | {"ranks": ranks}

    found = findings(edited(rollouts, by_rank))
    assert set(found) == {"advantages"} and "data-parallel ranks normalise" in found["advantages"].title
    for whole in (lambda r: normalised(r, torch.zeros(r.size).long()), lambda r: {}):
        assert "advantages" not in findings(
            edited(rollouts, lambda r, whole=whole: whole(r) | {"ranks": ranks})
        )


def test_prompts_of_one_length_are_normalised_on_each_rank_that_holds_them():
    def of_groups(r):
        rewards = r.rewards.view(-1, SIZE)
        centre = rewards - rewards.mean(1, keepdim=True)
        scaled = (centre / centre.std(1, correction=0, keepdim=True).clamp_min(1e-6)).flatten()
        ranks = tuple(i // (2 * SIZE) % 2 for i in range(64))
        return {"advantages": scaled.repeat_interleave(LENGTH).float(), "ranks": ranks}

    assert "advantages" not in findings(edited(run(), of_groups))
