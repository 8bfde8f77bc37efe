"""Parts of a run: samples with another text's log-probs, of one engine, rank or rollout, packed behind
another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slime_ext.tools.analysis.detectors import other_log_probs, stale_prefix
from slime_ext.tools.analysis.detectors.shared.exchanged import have_another_text
from slime_ext.tools.analysis.detectors.shared.kinds import two_kinds
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

SAMPLES = 64


def mixed(is_far, count=6, rollouts=None, **fields):
    """A run in which some samples come from other weights, whose versions are named as the others'."""
    policy, parts = Policy(), []
    other = policy.table + 0.6 * policy.normal(60, 60)
    for number in range(count):
        good = sampled(policy, number)
        bad = sampled(policy, number, sampler=other)
        far = torch.tensor([is_far(i) for i in range(SAMPLES)])
        far &= rollouts is None or number in rollouts
        at = far[good.segments.ids.long()]
        names = ("behavior", "proximal", "tokens")
        taken = {name: torch.where(at, getattr(bad, name), getattr(good, name)) for name in names}
        parts.append(replace(good, **taken, **fields))
        policy.step()
    return parts


ENGINES = tuple(f"http://node{i % 8}" for i in range(SAMPLES))


def test_one_engine_at_other_weights_is_named_with_its_share():
    found = findings(mixed(lambda i: i % 8 == 3, engines=ENGINES))
    assert set(found) == {"part_of_run"} and "of engine http://node3" in found["part_of_run"].title
    assert "8 in" not in found["part_of_run"].evidence and "of the run's k3" in found["part_of_run"].evidence


def test_an_engine_that_is_wrong_for_two_rollouts_is_named_with_them():
    found = findings(mixed(lambda i: i % 8 == 3, rollouts=(2, 3), engines=ENGINES))
    assert set(found) == {"part_of_run"} and found["part_of_run"].rollouts == (2, 3)


def test_one_rank_of_the_trainer_is_named():
    found = findings(mixed(lambda i: i % 4 == 1, ranks=tuple(i % 4 for i in range(SAMPLES))))
    assert set(found) == {"part_of_run"} and "data-parallel rank 1" in found["part_of_run"].title


def test_a_rank_that_has_more_old_samples_is_not_named():
    """Samples of one rank come from older weights, as a replay buffer may hand them out."""
    far = torch.tensor([i % 4 == 1 for i in range(SAMPLES)])

    def aged(r):
        return {"versions": torch.where(far[r.segments.ids.long()], r.versions - 3, r.versions)}

    rollouts = mixed(lambda i: i % 4 == 1, ranks=tuple(i % 4 for i in range(SAMPLES)))
    assert "part_of_run" not in findings(edited(rollouts, aged))


def test_a_few_responses_of_one_token_that_are_far_off_by_chance_are_not_named():
    """Four tokens of one rollout: their k3 is 12 times that of the others, but 2% of k3 there."""

    def short(r):
        is_short = (r.segments.ids % 16 == 0) & (r.rollout_id == 2)
        noise = 0.03 * torch.randn(r.size, generator=torch.Generator().manual_seed(r.rollout_id))
        behavior = torch.where(is_short, r.proximal + 0.13, r.behavior + noise).clamp(max=-1e-3)
        statuses = tuple("aborted" if i % 16 == 0 else "completed" for i in range(r.count))
        return {
            "mask": ~is_short | (r.segments.within == 0),
            "behavior": behavior,
            "statuses": statuses if r.rollout_id == 2 else r.statuses,
        }

    assert findings(edited(run(), short)) == {}


def test_an_engine_whose_version_is_no_number_is_named_by_it():
    rollouts = mixed(lambda i: i % 8 == 3)
    far = torch.tensor([i % 8 == 3 for i in range(SAMPLES)])
    unnumbered = edited(
        rollouts, lambda r: {"versions": torch.where(far[r.segments.ids.long()], -1, r.versions)}
    )
    found = findings(unnumbered)
    assert set(found) == {"part_of_run"} and "not a number" in found["part_of_run"].title


def test_a_status_that_all_but_a_few_samples_of_a_far_rollout_have_is_not_named():
    statuses = ("completed",) * (SAMPLES - 1) + ("truncated",)
    rollouts = mixed(lambda i: i < SAMPLES - 1, count=8, rollouts=(4, 5), statuses=statuses)
    assert "part_of_run" not in findings(rollouts)


def test_far_samples_without_a_label_are_a_symptom():
    found = findings(mixed(lambda i: i % 8 == 3))
    assert set(found) == {"some_samples"} and found["some_samples"].says == "symptom"


EACH = SAMPLES // PROMPTS  # samples of a prompt


def misses_pushes(shares_text, off=0.6, **fields):
    """A run in which every fourth sample comes from an engine that gets no pushes after the second.

    Args:
        shares_text: number of first tokens that all samples of a prompt have.
        off: how far the engine's log-probs then are, times their uncertainty.
    """
    far = torch.tensor([i % 4 == 1 for i in range(SAMPLES)])

    def edit(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        first = torch.arange(SAMPLES) // EACH * EACH * LENGTH  # of the prompt's first sample
        source = torch.where(
            r.segments.within < shares_text,
            first[r.segments.ids.long()] + r.segments.within,
            torch.arange(r.size),
        )
        same = {name: getattr(r, name)[source] for name in ("tokens", "behavior", "proximal")}
        size = off * (1 - same["behavior"].exp()) * (r.rollout_id > 1)
        noise = size * torch.randn(r.size, generator=g)[source] - size.square() / 2
        moved = torch.where(far[r.segments.ids.long()], same["behavior"] - noise, same["behavior"])
        return same | {"behavior": moved.clamp(max=-1e-5)} | fields

    return edited(run(6), edit)


@pytest.mark.parametrize("off", [0.25, 0.4, 0.6])
def test_an_engine_that_misses_pushes_is_no_stale_prefix_though_all_its_prompts_are_cached(off):
    cached = tuple(7 * (i % 4 > 0) for i in range(SAMPLES))  # the first of four answers fills the cache
    found = findings(misses_pushes(20, off, cached=cached))
    assert set(found) == {"engines_apart"}


@pytest.mark.parametrize("begin", [4, 12, 30])
def test_samples_that_are_far_off_at_some_positions_have_no_engine_of_their_own(begin):
    """Other weights act on the first token and on the last."""
    plain, rollouts = misses_pushes(45, 0.0), misses_pushes(45, 0.6)

    def at_some(r):
        is_there = (r.segments.within >= begin) & (r.segments.within < begin + 14)
        return {"behavior": torch.where(is_there, r.behavior, plain[r.rollout_id].behavior)}

    assert set(findings(rollouts)) == {"engines_apart"}
    found = findings(edited(rollouts, at_some))
    assert found and "engines_apart" not in found


def test_samples_that_agree_beside_far_ones_have_no_old_weights_and_no_old_prefix():
    """Their texts tell nothing, but old weights act on all samples of a rollout, and an old prefix on all
    answers after it."""
    cached = tuple(7 * (i % 4 > 0) for i in range(SAMPLES))
    rollouts = misses_pushes(0, 0.6, cached=cached)
    apart = edited(rollouts, lambda r: {"tokens": r.tokens + 60 * r.segments.ids.long()})
    (finding,) = findings(apart).values()
    assert finding.name == "some_samples" and "part_of_run" in finding.or_else


def test_most_samples_far_beside_others_that_agree_are_no_lower_precision():
    found = findings(mixed(lambda i: i % 8 > 2))
    assert set(found) == {"some_samples"}


def test_second_answers_that_are_appended_to_the_first_are_some_samples():
    """The trainer scores them after the first answer. They begin at places between 16 and 31."""

    def chained(r):
        begins = torch.tensor([16 + i % 16 if i % 5 == 0 else LENGTH for i in range(SAMPLES)])
        since = r.segments.within - begins[r.segments.ids.long()]
        noise = torch.randn(r.size, generator=torch.Generator().manual_seed(r.rollout_id)) - 2
        far = 2 * noise * torch.exp(-since / 8)
        return {"proximal": torch.where(since >= 0, r.behavior + far, r.behavior).clamp(max=-1e-5)}

    def cut(r):
        keep = (r.segments.ids % 5 == 0) | (r.segments.within < 28)
        names = ("tokens", "behavior", "proximal", "mask", "versions", "advantages")
        lengths = tuple(LENGTH if i % 5 == 0 else 28 for i in range(SAMPLES))
        return {name: getattr(r, name)[keep] for name in names} | {"lengths": lengths}

    (finding,) = findings(edited(edited(run(6), chained), cut)).values()
    assert finding.name == "some_samples"


def begun_before(rollouts):
    """The first third of all answers to half of the prompts comes from weights two rollouts ago."""
    policy, tables, mixed_rollouts = Policy(moves=0.25), [], []
    for number in range(rollouts):
        tables.append(policy.table)
        weights = policy.table, tables[-3:][0]
        good, old = (sampled(policy, number, sampler=table, noise=1e-4) for table in weights)
        at = (good.segments.ids < SAMPLES // 2) & (good.segments.within < LENGTH // 3)
        names = ("behavior", "proximal", "tokens")
        taken = {name: torch.where(at, getattr(old, name), getattr(good, name)) for name in names}
        mixed_rollouts.append(replace(good, **taken))
        policy.step()
    return mixed_rollouts


def test_responses_that_were_begun_before_a_push_may_have_the_version_at_their_end():
    rollouts = begun_before(6)
    found = findings(rollouts)
    assert found["prefix_mismatch"].or_else == ("stale_weights",)
    assert found["some_prompts"].or_else == ("part_of_run", "stale_weights")
    assert not any(finding.severity == "error" for finding in found.values())
    since_a_push = [replace(r, rollout_id=i) for i, r in enumerate(rollouts[2:])]
    (finding,) = (f for f in findings(since_a_push).values() if f.severity == "error")
    assert finding.name == "prefix_mismatch"


def test_answers_after_a_cached_prefix_that_are_all_off_are_a_stale_prefix():
    """All but the first of four answers: the engine scores equal text after the prefix alike."""
    labels = {"cached": tuple(7 * (i % 4 > 0) for i in range(SAMPLES))}

    def of_prefix(r):
        noise = torch.randn(r.size, generator=torch.Generator().manual_seed(r.rollout_id))
        size = 0.4 * (1 - r.proximal.exp())
        at = torch.tensor(labels["cached"])[r.segments.ids.long()] > 0
        first = (torch.arange(SAMPLES) // EACH * EACH * LENGTH)[r.segments.ids.long()] + r.segments.within
        early = r.segments.within < 20
        same = {name: torch.where(early, getattr(r, name)[first], getattr(r, name)) for name in NAMES}
        noise = torch.where(early, noise[first], noise)
        moved = same["behavior"] - torch.where(at, size * noise - size.square() / 2, 0)
        return same | {"behavior": moved.clamp(max=-1e-5)} | labels

    assert "stale_prefix" in findings(edited(run(6), of_prefix))


NAMES = ("tokens", "behavior", "proximal")


def test_prompts_whose_samples_are_all_far_off_are_a_symptom():
    found = findings(mixed(lambda i: i // EACH == 3, engines=ENGINES))
    assert set(found) == {"some_prompts"} and "6 of 48 prompts" in found["some_prompts"].title
    assert not found["some_prompts"].or_else  # engines have samples of every prompt
    assert set(findings(mixed(lambda i: i // EACH == 3))["some_prompts"].or_else) == {
        "part_of_run",
        "prefix_mismatch",
    }


def shaped(rollouts, is_long):
    """Some samples have two turns, behind a tool that says four tokens."""

    def edit(r):
        far = torch.tensor([is_long(i) for i in range(SAMPLES)])[r.segments.ids.long()]
        return {"mask": ~(far & (r.segments.within >= 24) & (r.segments.within < 28))}

    return edited(rollouts, edit)


def test_samples_of_several_turns_alone_are_named():
    found = findings(shaped(mixed(lambda i: i % 8 == 3), lambda i: i % 8 == 3))
    assert set(found) == {"part_of_run"} and "of 2 turns" in found["part_of_run"].title


def test_later_turns_that_are_far_off_are_not_their_samples():
    def late(r):
        at = (r.segments.ids % 8 == 3) & (r.segments.within >= 28)
        g = torch.Generator().manual_seed(r.rollout_id)
        return {"proximal": torch.where(at, r.proximal + torch.randn(r.size, generator=g), r.proximal)}

    assert "part_of_run" not in findings(edited(shaped(run(), lambda i: i % 8 == 3), late))


def test_as_many_samples_of_any_prompt_are_not_its_prompts():
    assert "some_prompts" not in findings(mixed(lambda i: i % 8 == 3, engines=ENGINES[:1] * SAMPLES))


def test_two_rollouts_alone_are_compared_with_all_others():
    found = findings(mixed(lambda i: True, count=8, rollouts=(4, 5)))
    assert set(found) == {"rollouts_apart"} and found["rollouts_apart"].rollouts == (4, 5)


def test_an_engine_that_is_like_the_others_is_not_named():
    assert findings(edited(run(6), lambda r: {"engines": ENGINES})) == {}


def test_log_probs_of_other_samples_are_named():
    def swapped(r):
        rows = r.behavior.view(SAMPLES, LENGTH).clone()
        rows[[3, 40]], rows[[11, 19]] = rows[[40, 3]], rows[[19, 11]]
        return {"behavior": rows.flatten()}

    found = findings(edited(run(2), swapped))
    assert set(found) == {"other_log_probs"} and "of another sample" in found["other_log_probs"].title


@pytest.mark.parametrize(("noise", "is_one"), [(0.0, True), (0.01, True), (0.5, False)])
def test_log_probs_that_fit_another_sample_only_roughly_are_not_its_own(noise, is_one):
    def swapped(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        rows = r.behavior.view(SAMPLES, LENGTH).clone()
        rows[:16] = rows[:16].roll(5, 0) + noise * torch.randn(16, LENGTH, generator=g)
        return {"behavior": rows.flatten().clamp(max=-1e-6)}

    found = findings(edited(run(), swapped))
    assert ("other_log_probs" in found and "of another sample" in found["other_log_probs"].title) == is_one


@pytest.mark.parametrize("side", ["behavior", "proximal"])
def test_log_probs_that_are_many_places_late_in_their_own_list_are_named_with_the_share_that_they_make(side):
    """A list is appended to that of an aborted attempt, or is cut from the end of a padded row."""

    def late(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        rows = getattr(r, side).view(SAMPLES, LENGTH).clone()
        for i in range(0, SAMPLES, 4):
            size = 4 + i % 20
            rows[i] = torch.cat([-6 * torch.rand(size, generator=g), rows[i][:-size]])
        return {side: rows.flatten()}

    found = findings(edited(run(2), late))
    assert set(found) == {"other_log_probs"}
    (finding,) = found.values()
    assert "other places of their own list" in finding.title and finding.explains > 0.95
    assert finding.severity == "error"


def test_log_probs_of_an_attempt_before_are_named():
    before = run(2, policy=Policy(9))

    def retried(r):
        is_retried = r.segments.ids % 9 == 0
        return {"behavior": torch.where(is_retried, before[r.rollout_id].behavior, r.behavior)}

    found = findings(edited(run(2), retried))
    assert set(found) == {"other_log_probs"} and "an earlier attempt" in found["other_log_probs"].title


@pytest.mark.parametrize(("times", "last"), [(3, 8), (4, 12)])
def test_an_attempt_before_that_begins_as_the_kept_one_is_no_engine_of_its_own(times, last):
    """Its log-probs are wrong from the first other token on: in most samples in the last few tokens alone."""
    before = run(policy=Policy(9))

    def retried(r):
        ids, within = r.segments.ids, r.segments.within
        is_other = (ids % 4 == 0) & ((within >= LENGTH - last) | (ids % (4 * times) == 0))
        return {"behavior": torch.where(is_other, before[r.rollout_id].behavior, r.behavior)}

    found = findings(edited(run(), retried))
    assert set(found) == {"other_log_probs"} and "an earlier attempt" in found["other_log_probs"].title


@pytest.mark.parametrize(("times", "last"), [(6, 20), (8, 24)])
def test_few_unrelated_of_many_far_samples_have_another_text_if_the_mean_ratio_is_above_1(times, last):
    """Another prompt or other weights would leave it at 1."""
    before = run(policy=Policy(9))

    def retried(r):
        ids, within = r.segments.ids, r.segments.within
        is_other = (ids % 4 == 0) & ((within >= LENGTH - last) | (ids % (4 * times) == 0))
        behavior = torch.where(is_other, before[r.rollout_id].behavior, r.behavior)
        return {"behavior": behavior, "groups": None}

    rollouts = edited(run(), retried)
    kinds = two_kinds(diagnosed(rollouts))
    assert kinds and not have_another_text(diagnosed(rollouts), kinds)
    assert set(findings(rollouts)) == {"other_log_probs"}


def shaken(rollouts, is_far):
    """The trainer's log-probs with noise that is new each time, and under which the mean ratio remains 1."""

    def edit(r):
        g = torch.Generator().manual_seed(11 + r.rollout_id)
        size = 0.4 * (1 - r.proximal.exp())
        noise = size * torch.randn(r.size, generator=g) - size.square() / 2
        at = torch.tensor([bool(is_far(i)) for i in range(SAMPLES)])[r.segments.ids.long()]
        return {"proximal": torch.where(at, r.proximal + noise, r.proximal).clamp(max=-1e-5)}

    return edited(rollouts, edit)


def test_a_trainer_that_scores_equal_text_otherwise_each_time_has_dropout():
    assert set(findings(shaken(run(), lambda i: True))) == {"dropout"}


def test_an_engine_that_scores_equal_text_otherwise_each_time_is_no_dropout():
    def sides(r):
        return {"behavior": r.proximal, "proximal": r.behavior}

    assert set(findings(edited(shaken(run(), lambda i: True), sides))) == {"engines_apart"}


def test_log_probs_in_another_order_are_no_dropout():
    """Equal text has other log-probs in longer samples, too, but the mean ratio is above 1."""

    def reordered(r):
        rows = r.proximal.view(SAMPLES, LENGTH)
        cuts = [12 + i % 9 for i in range(SAMPLES)]
        return {"proximal": torch.cat([row.roll(cut) for row, cut in zip(rows, cuts, strict=True)])}

    found = findings(edited(run(), reordered))
    assert found and not {"dropout", "packing_leak"} & set(found)


def test_chunks_in_the_wrong_order_are_named():
    def joined(r):
        rows = r.proximal.view(SAMPLES, LENGTH)
        first, second, third, fourth = rows.tensor_split(4, dim=1)
        return {"proximal": torch.cat([first, third, fourth, second], 1).flatten()}

    assert set(findings(edited(run(2), joined))) == {"permuted_log_probs"}


def test_samples_behind_others_of_their_pack_are_a_leak():
    places = tuple(i % 4 for i in range(SAMPLES))
    rollouts = edited(shaken(run(), lambda i: i % 4), lambda r: {"places": places})
    found = findings(rollouts)
    assert set(found) == {"packing_leak"} and "only the first of each" in found["packing_leak"].title


def test_prompts_after_the_first_are_no_leak_if_the_trainer_scores_equal_text_alike():
    """All prompts but the first of a rollout are far off, and only its samples come first in their packs."""
    places = tuple(i // PROMPTS for i in range(SAMPLES))
    found = findings(mixed(lambda i: i >= PROMPTS, places=places))
    assert found and "packing_leak" not in found


@pytest.mark.parametrize("shift", [0.0, -4.0])
def test_the_farthest_of_many_far_samples_have_no_other_text(shift):
    """The log-probs of the last prompt are unrelated. What moves most of the others may move those, too."""

    def far(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        by_text = -0.3 - 3 * torch.rand(60, LENGTH, generator=g)
        unrelated = by_text[r.tokens, r.segments.within.long()]
        others = r.proximal + shift * (r.segments.ids >= PROMPTS)
        return {"proximal": torch.where(r.segments.ids >= SAMPLES - PROMPTS, unrelated, others)}

    assert (other_log_probs.look(diagnosed(edited(run(), far))) is None) == (shift < 0)


def test_a_leak_is_told_from_a_stale_prefix_by_the_side_that_differs():
    """The samples behind another of their pack may be those whose prompt was cached."""
    places = tuple(i % 4 for i in range(SAMPLES))
    labels = {"places": places, "cached": tuple(7 * (place > 0) for place in places)}
    rollouts = edited(shaken(run(2), lambda i: i % 4), lambda r: labels)
    assert set(findings(rollouts)) == {"packing_leak"}
    assert stale_prefix.look(diagnosed(rollouts)) is None  # or the one that explains more would be named


def test_prompts_from_the_cache_that_come_later_in_their_packs_are_no_leak():
    """Samples without a cached prefix agree behind others as well; the first ones agree to the last bit."""
    places = tuple(i % 4 for i in range(SAMPLES))
    cached = tuple(7 * (i % 4 > 1 and i % 8 > 3) for i in range(SAMPLES))

    def edit(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        is_cached = (torch.tensor(cached) > 0)[r.segments.ids.long()]
        shift = is_cached * 0.5 * torch.randn(r.size, generator=g)
        exact = torch.where(r.segments.ids % 4 == 0, r.proximal, r.behavior)
        return {"behavior": (exact + shift).clamp(max=-1e-6), "places": places, "cached": cached}

    assert "packing_leak" not in findings(edited(run(), edit))


def test_a_prompt_that_one_side_lacks_is_told_by_a_distance_that_falls():
    def cut(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        size = (-r.segments.within / 8).exp()
        noise = torch.randn(r.size, generator=g) * size - size.square() / 2  # the mean ratio stays 1
        return {"proximal": (r.proximal + noise).clamp(max=-1e-5), "groups": None}

    found = findings(edited(run(2, samples=64), cut))
    assert "prefix_mismatch" in found or "prompt_cut" in found
    assert PROMPTS == 8


def test_noise_that_is_loud_leans_below_zero_and_is_dense_all_the_same():
    """What is likely for the sampler by its noise is sampled, so few tokens are likelier for the trainer."""
    policy = Policy()
    found = findings(run(2, policy=policy, sampler=policy.table + 1.3 * policy.normal(60, 60)))
    assert "quantised" in found and "layer" in {"layer", *found["quantised"].or_else}


def test_a_distance_late_in_responses_that_get_longer_is_no_push_that_fails():
    policy, rollouts = Policy(), []
    for number in range(8):
        good = sampled(policy, number, length=26 + 8 * number)
        late = (good.segments.within >= 24) * 0.5 * (1 - good.proximal.exp())
        noise = late * torch.randn(good.size, generator=policy.generator) - late.square() / 2
        rollouts.append(replace(good, proximal=(good.proximal + noise).clamp(max=-1e-5), groups=None))
        policy.step()
    found = findings(rollouts)
    assert set(found) == {"kv_precision"}


def test_starts_that_are_another_samples_numbers_bit_by_bit_are_named():
    def borrow(r):
        behavior, length = r.behavior.clone(), r.lengths[0]
        for sample in range(0, r.count, 8):
            source = (sample + 3) % r.count * length + 20
            behavior[sample * length : sample * length + 4] = r.behavior[source : source + 4] - 3.0
        behavior_of_others = behavior.clone()
        for sample in range(0, r.count, 8):
            source = (sample + 3) % r.count * length + 20
            start = sample * length
            behavior_of_others[source : source + 4] = behavior[start : start + 4]
        return {
            "behavior": behavior_of_others,
            "proximal": torch.where(
                torch.arange(r.size) % length >= 20, behavior_of_others + 0.001, r.proximal
            ),
        }

    found = findings(edited(run(4), borrow))
    assert "begin with the log-probs" in found["other_log_probs"].title
    assert "prefix_mismatch" not in found


def test_samples_that_begin_with_the_same_text_borrow_nothing():
    """Answers to one prompt often begin alike, with the same numbers, however far the trainer is."""

    def alike(r):
        tokens, behavior, length = r.tokens.clone(), r.behavior.clone(), r.lengths[0]
        for sample in range(1, r.count):
            tokens[sample * length : sample * length + 4] = tokens[:4]
            behavior[sample * length : sample * length + 4] = behavior[:4]
        far = torch.where(torch.arange(r.size) % length < 4, behavior - 1.0, r.proximal)
        return {"tokens": tokens, "behavior": behavior, "proximal": far}

    assert "other_log_probs" not in findings(edited(run(2), alike))
