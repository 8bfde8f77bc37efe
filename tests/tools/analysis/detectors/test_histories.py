"""Processors of logits that the sampler alone has: penalties, a bias, a minimum of tokens."""

from __future__ import annotations

import pytest
import torch

from slime_ext.tools.analysis.detectors.shared.kinds import two_kinds
from tests.tools.analysis.detectors.toys import Policy, diagnosed, edited, findings, lagging, run, sampled


def frequency(logits, seen, at):
    return logits - 0.4 * seen


def presence(logits, seen, at):
    return logits - 0.7 * (seen > 0)


def repetition(logits, seen, at):
    held = torch.where(logits > 0, logits / 1.3, logits * 1.3)
    return torch.where(seen > 0, held, logits)


@pytest.mark.parametrize("penalty", [frequency, presence, repetition])
def test_a_penalty_is_named_by_what_came_before(penalty):
    found = findings(run(2, warp=penalty))
    assert set(found) == {"penalties"} and "holds back" in found["penalties"].title


def test_responses_that_end_at_once_do_not_hide_a_penalty():
    """Their one token is not penalised, but so short an agreement makes no second kind of samples."""

    def short(r):
        is_long = (r.segments.ids % 8 > 0) | (r.segments.within == 0)
        return {"mask": is_long}

    assert set(findings(edited(run(2, warp=repetition), short))) == {"penalties"}


def test_samples_of_which_the_sampler_is_sure_do_not_hide_a_penalty():
    """Both sides agree there whatever the penalty, so they make no second kind of samples."""

    def sure(r):
        is_sure = r.segments.ids % 8 == 0
        return {name: torch.where(is_sure, -1e-4, getattr(r, name)) for name in ("behavior", "proximal")}

    assert set(findings(edited(run(2, warp=presence), sure))) == {"penalties"}


def test_a_temperature_and_rounded_weights_are_no_penalty():
    hot = findings(run(warp=lambda logits, seen, at: logits / 0.8))
    policy = Policy()
    rounded = policy.table + 0.5 * policy.normal(60, 60)
    noisy = findings(run(policy=policy, sampler=rounded))
    assert "penalties" not in {*hot, *noisy} and "temperature" in hot


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_values_that_the_certainty_of_tokens_explains_are_no_penalty(seed):
    """Accepted draft tokens have the draft's log-prob. Repeated tokens are likelier, so they differ too."""
    policy = Policy(seed)
    draft = policy.table + 0.4 * policy.normal(60, 60)
    policy.table[:, :8] += 2.5  # frequent tokens, which the draft finds likelier still
    draft[:, :8] += 3.2

    def accepted(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        before = torch.cat([r.tokens.new_zeros(1), r.tokens[:-1]])
        proposed = draft.log_softmax(1)[before, r.tokens].to(r.behavior.dtype)
        chance = (proposed - r.behavior).exp()
        is_accepted = torch.rand(r.size, generator=g) < chance
        return {"behavior": torch.where(is_accepted, proposed, r.behavior)}

    assert "penalties" not in findings(edited(run(6, policy=policy), accepted))


def test_a_distance_that_falls_along_the_response_is_no_penalty():
    """New tokens come early, so they are further off, as after another prompt; none is held back."""

    def falling(r):
        return {"proximal": r.proximal - 0.8 * torch.exp(-r.segments.within / 24)}

    found = findings(edited(run(), falling))
    assert found and "penalties" not in found


def test_a_bias_on_a_token_is_named_by_its_id():
    def biased(logits, seen, at):
        return logits + 3.0 * (torch.arange(60) == 17)

    found = findings(run(2, warp=biased))
    assert set(found) == {"logit_bias"} and "of id 17 (modulo 4096)" in found["logit_bias"].evidence


def test_biases_of_both_signs_are_named_by_their_ids():
    """Tokens that compete with a banned one gain, which is no bias of their own."""
    bias = torch.zeros(60)
    bias[[5, 6]], bias[[9, 10]] = 2.0, -4.0
    found = findings(run(2, warp=lambda logits, seen, at: logits + bias))
    assert set(found) == {"logit_bias"}
    ids = found["logit_bias"].evidence.partition(" of id ")[2].split(" (")[0].split(", ")
    assert {"5", "6"} <= set(ids) <= {"5", "6", "9", "10"}


@pytest.mark.parametrize("seed", range(3))
def test_a_bias_is_named_although_samples_without_its_token_agree(seed):
    """The token follows four others only, so some samples never come near it, and agree exactly."""
    policy = Policy(seed=seed)
    policy.table[:, 17], policy.table[:4, 17] = -20.0, 1.0
    biased = run(
        policy=policy,
        length=16,
        noise=1e-4,
        warp=lambda logits, seen, at: logits + 2 * (torch.arange(60) == 17),
    )
    assert two_kinds(diagnosed(biased)) and set(findings(biased)) == {"logit_bias"}


def test_ids_that_only_wrong_samples_have_are_no_bias():
    """Each token of every eighth sample is off, and three in ten of these are an id that no other has."""

    def wrong(r):
        is_far, draw = r.segments.ids % 8 == 0, torch.rand(r.size, generator=generator)
        off = 1 + 0.3 * torch.randn(r.size, generator=generator)
        return {
            "tokens": torch.where(is_far & (draw < 0.3), 60, r.tokens),
            "proximal": torch.where(is_far, r.behavior - off, r.proximal),
        }

    generator = torch.Generator().manual_seed(0)
    found = findings(edited(run(), wrong))
    assert found and "logit_bias" not in found


def test_a_row_that_is_off_by_the_context_is_no_bias():
    """Rounded weights move each token by another distance after each token."""
    policy = Policy()
    other = policy.table.clone()
    other[:, 17] += 2 + 2 * policy.normal(60)
    found = findings(run(policy=policy, sampler=other))
    assert found and "logit_bias" not in found


def test_a_minimum_of_tokens_is_named_by_its_place():
    end = torch.arange(60) == 3

    def no_end(logits, seen, at):
        return torch.where(end & (at < 16), -1e9, logits)

    def likely_end(policy):
        policy.table[:, 3] += 3.0
        return policy

    found = findings(run(2, policy=likely_end(Policy()), warp=no_end))
    assert set(found) == {"minimum_length"}
    (place,) = (int(word) for word in found["minimum_length"].title.split() if word.isdecimal())
    assert 13 <= place <= 19
    assert findings(run(policy=likely_end(Policy()))) == {}


@pytest.mark.parametrize(("share", "count"), [(10, 4), (20, 6)])
def test_a_minimum_of_tokens_may_be_a_grammar_where_the_end_had_nearly_all_probability(share, count):
    """Without the end token, the others are then far likelier, as if few could be chosen."""
    end, policy = torch.arange(60) == 3, Policy()
    policy.table[::share, 3] += 20.0

    def no_end(logits, seen, at):
        return torch.where(end & (at < 16), -1e9, logits)

    (finding,) = findings(run(count, policy=policy, warp=no_end)).values()
    assert finding.name == "constrained_decoding" and finding.or_else == ("minimum_length",)
    assert "remove min_new_tokens" in finding.fix


def far_at_first(r):
    """Moves the first two tokens further with each step since the push: the answer, of four tokens."""
    moved = (r.segments.within < 2) & (r.tokens % 3 == 0)
    return {"proximal": r.proximal - 1.5 * (r.rollout_id % 4) * moved}


def test_a_lag_in_short_answers_is_no_place_and_no_minimum_of_tokens():
    """Of an answer of four tokens, all are among the last; and the first may change most."""
    assert set(findings(lagging(0.6))) == {"stale_weights"}
    assert set(findings(edited(lagging(0.03), far_at_first))) == {"stale_weights"}


def test_noise_at_every_token_is_lower_precision_and_says_what_it_saw():
    policy = Policy()
    found = findings(run(policy=policy, sampler=policy.table + 0.25 * policy.normal(60, 60)))
    assert set(found) == {"quantised"} and found["quantised"].or_else == ("layer",)
    assert "The same text has the same log-probs each time" in found["quantised"].evidence


def test_a_policy_without_a_version_is_another_one():
    policy = Policy()
    teacher = policy.table + 0.5 * policy.normal(60, 60)
    rollouts = run(policy=policy, sampler=teacher)
    found = findings(edited(rollouts, lambda r: {"versions": 0 * r.versions - 1, "newest": None}))
    assert set(found) == {"another_policy"} and found["another_policy"].or_else == ("quantised",)


def test_a_trainer_that_moves_away_from_a_policy_that_stays_tells_it_from_rounding():
    policy = Policy(moves=0.3)
    teacher = policy.table + 0.5 * policy.normal(60, 60)
    found = findings(run(6, policy=policy, sampler=teacher))
    assert set(found) == {"another_policy"} and not found["another_policy"].or_else


def test_one_far_sample_in_the_last_rollout_moves_no_trainer_away():
    """The mean of the last rollouts rises by half, and so does its error."""

    def one(r):
        is_one = (r.rollout_id == 5) & (r.segments.ids == 0)
        return {"proximal": torch.where(is_one, r.behavior + 2.5, r.proximal)}

    policy = Policy()
    found = findings(edited(run(6, policy=policy, sampler=policy.table + 0.25 * policy.normal(60, 60)), one))
    assert set(found) == {"quantised"} and "another_policy" not in found["quantised"].or_else


def test_no_lag_is_guessed_where_rollout_0_is_far_off_itself():
    policy = Policy(moves=1.5)
    teacher = policy.table + 1.4 * policy.normal(60, 60)
    unknown = edited(run(6, policy=policy, sampler=teacher), lambda r: {"versions": None, "newest": None})
    assert set(findings(unknown)) == {"another_policy"}


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_lag_is_guessed_beside_noise_unless_the_distance_grows_up_to_the_end(lag):
    """A teacher stays, so that the trainer leaves it further and further behind; a lag stops growing.

    Args:
        lag: in rollouts; 0 is a teacher.
    """
    policy, tables, rollouts = Policy(moves=0.8), [], []
    noise = 0.3 * policy.normal(60, 60)
    for number in range(8):
        tables.append(policy.table)
        held = tables[max(number - lag, 0)] if lag else tables[0]
        unknown = {"versions": None, "newest": None}
        rollouts.append(sampled(policy, number, sampler=held + noise, **unknown))
        policy.step()
    found = findings(rollouts)
    assert ("stale_weights" in found) == (lag > 0)
    assert lag or set(found) == {"another_policy"}


def tempered(rollouts):
    """The trainer scores as was sampled; the sampler's log-probs are those of the logits as they are."""
    return edited(rollouts, lambda r: {"behavior": r.proximal, "proximal": r.behavior})


def at_temperature(logits, seen, at):
    return logits / 0.7


def test_log_probs_that_were_divided_by_the_temperature_are_named_with_it():
    divided = edited(tempered(run(2, warp=at_temperature)), lambda r: {"behavior": r.behavior / 0.7})
    found = findings(divided)
    assert set(found) == {"scaled_log_probs"}
    told = found["scaled_log_probs"].title.partition("a temperature of ")[2].split()[0]
    assert 0.63 <= float(told) <= 0.71  # one rival is assumed, so several make it too low


def test_log_probs_times_a_factor_are_named_with_it():
    found = findings(edited(run(), lambda r: {"behavior": 1.25 * r.behavior}))
    assert set(found) == {"scaled_log_probs"} and "1.25 times" in found["scaled_log_probs"].title


def test_log_probs_from_before_the_temperature_are_not_scaled():
    found = findings(tempered(run(2, warp=at_temperature)))
    assert set(found) == {"before_temperature"}


def test_a_softmax_over_rows_that_no_token_has_is_told_by_its_mass():
    """They hold more of it where the logits are low: log-ratios of one sign, of any size."""

    def phantom(r):
        context = torch.where(r.segments.within < 2, 0, (r.tokens.roll(1) * 60 + r.tokens.roll(2)) % 997)
        mass = torch.exp(2 * torch.randn(997, generator=torch.Generator().manual_seed(3)) - 4)
        return {"proximal": r.proximal - torch.log1p(mass[context])}

    found = findings(edited(run(2), phantom))
    assert (
        set(found) == {"truncated_sampling"}
        and "different sets of tokens" in found["truncated_sampling"].title
    )

    def far_below(r):  # few tokens, and the others agree on both sides
        at = torch.rand(r.size, generator=torch.Generator().manual_seed(r.rollout_id)) < 0.01
        return {"proximal": torch.where(at, r.proximal - 4, r.proximal)}

    assert "truncated_sampling" not in findings(edited(run(), far_below))
