"""What begins at a rollout, and what depends on where a rollout's prompts or versions come from."""

from __future__ import annotations

import pytest
import torch

from tests.tools.analysis.detectors.toys import edited, findings, run


def damaged(first, size=1.5):
    """From a rollout on the engine has damaged weights: what it draws is unlikely for the trainer."""

    def edit(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        far = r.proximal - size * torch.rand(r.size, generator=g).abs() * 4
        versions = torch.full_like(r.versions, r.rollout_id + 1)
        sides = {"proximal": far} if r.rollout_id >= first else {}
        return {"versions": versions, "newest": r.rollout_id + 1, "groups": None} | sides

    return edit


@pytest.mark.parametrize("first", [2, 5])
def test_weights_that_are_damaged_from_a_rollout_on_are_dated_and_are_not_old(first):
    found = findings(edited(run(8), damaged(first)))
    assert "damaged_weights" in found and "stale_weights" not in found
    assert found["damaged_weights"].title.startswith(f"From rollout {first} on the engine")
    assert found["damaged_weights"].rollouts == tuple(range(first, 8))


def test_what_is_far_from_rollout_1_on_may_be_a_lag():
    assert "damaged_weights" not in findings(edited(run(8), damaged(1)))


def test_responses_of_several_versions_are_noted_where_none_is_continued():
    def edit(r):
        return {"version_gaps": tuple(3 * (i % 8 == 0) for i in range(r.count))}

    rollouts = edited(run(3), edit)
    (note,) = findings(rollouts, partial_rollout=False, mask_offpolicy_in_partial_rollout=False).values()
    assert (note.name, note.severity) == ("mixed_versions", "note")
    assert note.title.startswith("12.5% of the responses") and "up to 3 versions apart" in note.evidence
    assert "trains on all of these tokens" in note.evidence
    assert findings(rollouts, partial_rollout=True) == {} and findings(rollouts) == {}


@pytest.mark.parametrize(("without", "is_named"), [((0, 5), True), ((0,), False)])
def test_rollouts_with_a_cached_prefix_that_are_far_beside_those_without_one(without, is_named):
    def edit(r):
        is_cached = r.rollout_id not in without
        g = torch.Generator().manual_seed(r.rollout_id)
        noise = 0.2 * torch.randn(r.size, generator=g) * is_cached
        return {
            "proximal": (r.proximal + noise).clamp(max=-1e-6),
            "cached": (100 * is_cached,) * r.count,
            "versions": torch.full_like(r.versions, r.rollout_id + 1),
            "newest": r.rollout_id + 1,
            "groups": None,
        }

    found = findings(edited(run(8), edit))
    assert ("stale_prefix" in found) == is_named
    assert not is_named or "stale_weights" in found["stale_prefix"].or_else


def test_the_first_token_of_responses_alone_is_named():
    def edit(r):
        is_first = (r.segments.within == 0) & (r.segments.ids % 8 == 0)
        return {"behavior": torch.where(is_first, r.behavior - 2, r.behavior)}

    (finding,) = findings(edited(run(4), edit)).values()
    assert finding.name == "shared_place" and "Only the first token of responses is" in finding.title
    assert "completion_tokens" in finding.fix


def test_first_tokens_after_another_prompt_are_no_lost_tokens():
    """The first two tokens hold 80% of the squared log-ratio, but the many that follow 40% of k3."""

    def edit(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        noise = 0.5 * torch.randn(r.size, generator=g) * (r.segments.within < 30)
        return {
            "proximal": torch.where(
                r.segments.within < 2, r.behavior - 4, (r.behavior + noise).clamp(max=-1e-6)
            )
        }

    found = findings(edited(run(4), edit))
    assert "prefix_mismatch" in found and "shared_place" not in found


@pytest.mark.parametrize(("age", "is_named"), [(0, True), (2, False)])
def test_samples_with_a_cached_prefix_are_compared_with_those_of_the_same_weights(age, is_named):
    """Every second sample has a cached prefix and is far off, perhaps because its weights are older."""

    def edit(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        is_second = r.segments.ids % 2 == 1
        noise = 0.2 * torch.randn(r.size, generator=g) * is_second
        return {
            "proximal": (r.proximal + noise).clamp(max=-1e-6),
            "cached": (0, 100) * (r.count // 2),
            "versions": r.rollout_id + 3 - age * is_second.long(),
            "newest": r.rollout_id + 3,
            "groups": None,
        }

    assert ("stale_prefix" in findings(edited(run(6), edit))) == is_named
