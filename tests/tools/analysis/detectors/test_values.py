"""What far tokens share: a value, a place at the end, forced neighbours, nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slime_ext.tools.analysis.detectors import tool_tokens
from slime_ext.tools.analysis.page.numbers import TILES
from tests.tools.analysis.detectors.toys import (
    LENGTH,
    PROMPTS,
    Policy,
    diagnosed,
    edited,
    findings,
    run,
)


def chosen(rollout, share, seed=1):
    g = torch.Generator().manual_seed(seed + rollout.rollout_id)
    return torch.rand(rollout.size, generator=g) < share


def filled(share, value):
    return lambda r: {"behavior": torch.where(chosen(r, share), value, r.behavior)}


def test_a_healthy_run_shares_nothing():
    assert findings(run()) == {}


def test_lone_log_probs_that_were_filled_in_are_named_by_their_value():
    for share, value in ((0.003, 0.0), (0.02, 0.0), (0.01, -20.0)):
        found = findings(edited(run(2), filled(share, value)))
        assert set(found) == {"shared_value"}, (share, value)
        assert f"{value:g}" in found["shared_value"].title and found["shared_value"].says == "cause"


def test_zeros_among_numbers_that_are_nearly_zero_were_recorded():
    """The sampler is sure of tokens that the trainer finds unlikely, and its softmax rounds to 1."""

    def sure(r, shares):
        g = torch.Generator().manual_seed(r.rollout_id)
        nearly = -(10.0 ** (-7 + 3 * torch.rand(r.size, generator=g)))
        is_zero, is_nearly = chosen(r, shares[0]), chosen(r, shares[1], 9)
        behavior = torch.where(is_zero, 0.0, torch.where(is_nearly, nearly, r.behavior))
        unlikely = -6 - 3 * torch.rand(r.size, generator=g)
        return {"behavior": behavior, "proximal": torch.where(is_zero | is_nearly, unlikely, r.proximal)}

    for nearly, is_lost in ((0.0, True), (0.002, False)):
        found = findings(edited(run(4), lambda r, nearly=nearly: sure(r, (0.003, nearly))))
        assert ("shared_value" in found) == is_lost


@pytest.mark.parametrize("sharp", [24.0, 36.0])
def test_a_surer_sampler_of_another_policy_is_not_renormalised(sharp):
    """Hardly any ratio is above 1, but after the same text log-ratios of different tokens differ."""
    policy = Policy()
    found = findings(run(policy=policy, sampler=sharp * policy.normal(60, 60)))
    assert found and not {"constrained_decoding", "truncated_sampling"} & set(found)


def test_zeros_of_which_each_rollout_has_one_are_named():
    def one(r):
        place = int(r.proximal.argmin())
        return {"behavior": torch.where(torch.arange(r.size) == place, 0.0, r.behavior)}

    assert set(findings(edited(run(6), one))) == {"shared_value"}


def test_different_tokens_with_a_value_are_not_counted_once_a_rollout():
    def one_id(r):
        return {"behavior": torch.where(r.tokens == 7, -20.0, r.behavior)}

    assert "shared_value" not in findings(edited(run(), one_id))

    def three_ids(r):
        return {"behavior": torch.where((r.tokens >= 7) & (r.tokens < 10), -20.0, r.behavior)}

    found = findings(edited(run(2), three_ids))
    assert set(found) == {"shared_value"}
    assert " tokens have at least 3 different ids." in found["shared_value"].evidence


def test_an_end_token_that_was_put_back_is_named_by_its_zero():
    def ended(r):
        is_last = r.segments.within == LENGTH - 1
        return {"behavior": torch.where(is_last, 0.0, r.behavior), "tokens": r.tokens.where(~is_last, 7)}

    found = findings(edited(run(1), ended))
    assert set(found) == {"shared_value"} and "at the last token" in found["shared_value"].evidence


def test_tokens_that_nobody_sampled_are_tool_output_and_no_lost_log_probs():
    def padded(r):
        place = r.segments.within % LENGTH
        is_tool = (place >= 20) & (place < 26)
        proximal = torch.where(is_tool, -9.0, r.proximal)
        return {"behavior": torch.where(is_tool, 0.0, r.behavior), "proximal": proximal}

    assert set(findings(edited(run(2), padded))) == {"tool_tokens"}


@pytest.mark.parametrize(("others", "name"), [(-1.0, "tool_tokens"), (0.0, "greedy_sampling")])
def test_told_tokens_in_the_mask_and_sampled_ones_outside_it_are_an_inverted_mask(others, name):
    """The engine writes 0 for tokens of tools; if it wrote 0 everywhere, the mask may be right."""

    def inverted(r):
        is_tool = r.segments.within % LENGTH >= 36
        behavior = torch.where(is_tool, 0.0, r.behavior if others else 0.0)
        proximal = torch.where(is_tool, 3 * r.proximal - 1, r.proximal)
        return {"behavior": behavior, "proximal": proximal, "mask": is_tool}

    found = findings(edited(run(2), inverted))
    assert set(found) == {name}
    assert ("the mask is inverted" in found[name].title) == (name == "tool_tokens")


@pytest.mark.parametrize("is_inverted", [True, False])
def test_samples_of_which_a_wrong_mask_leaves_nothing_are_not_selected(is_inverted):
    """Only samples with a reward of 1 have a token of a tool, or are trained on at all."""

    def selected(r):
        is_right = r.segments.expand(r.rewards > 0)
        is_tool = is_right & (r.segments.within >= 36)
        behavior = torch.where(is_tool, 0.0, r.behavior) if is_inverted else r.behavior
        proximal = torch.where(is_tool, 3 * r.proximal - 1, r.proximal) if is_inverted else r.proximal
        mask = is_tool if is_inverted else is_right
        return {"behavior": behavior, "proximal": proximal, "mask": mask, "dropped": torch.zeros(0, 4)}

    found = findings(edited(run(2), selected))
    assert set(found) == {"tool_tokens" if is_inverted else "selection_bias"}


def test_accepted_drafts_without_a_log_prob_are_no_tool_output():
    def accepted(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        is_draft = torch.rand(r.size, generator=g) < 0.9 * r.behavior.exp().sqrt()
        return {"behavior": torch.where(is_draft, 0.0, r.behavior)}

    assert set(findings(edited(run(2), accepted))) == {"shared_value"}


def test_the_last_tokens_of_cut_responses_are_named_with_their_status():
    cut = tuple("truncated" if i % 3 == 0 else "completed" for i in range(64))

    def wrong_at_the_end(r):
        is_cut = torch.tensor([status == "truncated" for status in cut])[r.segments.ids.long()]
        is_last = r.segments.within >= LENGTH - 3
        return {"behavior": torch.where(is_cut & is_last, -20.0 - r.behavior, r.behavior), "statuses": cut}

    found = findings(edited(run(2), wrong_at_the_end))
    assert set(found) == {"shared_place"}
    assert "the last 3 tokens of responses that were cut at the limit" in found["shared_place"].title


def test_a_grammar_that_forces_some_tokens_and_restricts_others_is_constrained_decoding():
    allowed = torch.rand(60, generator=torch.Generator().manual_seed(5)) < 0.15

    def grammar(logits, seen, at):
        if not 20 <= at < 30:
            return logits
        few = allowed if at % 3 else torch.arange(60) == at
        return torch.where(few, logits, -1e9)

    assert set(findings(run(2, warp=grammar))) == {"constrained_decoding"}


def test_the_end_of_a_thought_that_a_budget_forces_is_no_tool_output():
    def budget(logits, seen, at):
        is_end = torch.arange(60) == 7
        has_ended = seen[:, 7:8] > 0
        return logits if at != 24 else torch.where(is_end | has_ended, logits, -1e9)

    found = findings(run(2, warp=budget))
    assert set(found) == {"constrained_decoding"}
    forced = found["constrained_decoding"]
    assert forced.or_else == ("tool_tokens",) and "Token 7" in forced.title
    assert "100% at place 24" in forced.evidence and forced.explains > 0.9


@pytest.mark.parametrize("chunks", [2, 4, 8])
@pytest.mark.parametrize("is_padded", [False, True])
def test_labels_that_are_rolled_within_chunks_are_named_with_their_number(chunks, is_padded):
    """The last position of a chunk scores the first token of its chunk, not that of the next chunk."""

    def rolled(r):
        whole = 8 + LENGTH
        ids = torch.arange(-(-whole // chunks) * chunks if is_padded else whole)
        begins = torch.tensor([int(chunk[0]) for chunk in ids.tensor_split(chunks)][1:])
        is_begin = torch.isin(r.segments.within + 8, begins)
        g = torch.Generator().manual_seed(r.rollout_id)
        return {"proximal": torch.where(is_begin, -4 - 8 * torch.rand(r.size, generator=g), r.proximal)}

    found = findings(edited(run(2), rolled))
    assert set(found) == {"shared_place"} and f"({chunks} chunks" in found["shared_place"].title
    assert found["shared_place"].severity == "error" and found["shared_place"].explains > 0.9


@pytest.mark.parametrize(("nearly", "is_filled"), [(1, True), (20, False)])
def test_zeros_in_runs_were_filled_in_unless_more_values_are_nearly_zero(nearly, is_filled):
    """A sure policy has zeros beside zeros. A trainer that is wrong meets the nearly sure tokens, too."""

    def sure(r):
        first = torch.arange(r.size) % 400
        is_zero, is_near = first < 2, (first >= 8) & (first < 8 + nearly)
        behavior = torch.where(is_near, -0.005, r.behavior).masked_fill(is_zero, 0.0)
        return {"behavior": behavior, "proximal": torch.where(is_zero | is_near, -8.0, r.proximal)}

    assert (tool_tokens.look(diagnosed(edited(run(), sure))) is not None) == is_filled


def sparse(r):
    g = torch.Generator().manual_seed(7 + r.rollout_id)
    far = torch.where(chosen(r, 0.004), 3.0 * torch.randn(r.size, generator=g), 0.0)
    return {"proximal": (r.proximal + far).clamp(max=-1e-4)}


def test_few_far_tokens_that_share_nothing_are_a_symptom_unless_the_model_has_experts():
    rollouts = edited(run(6), sparse)
    found = findings(rollouts)
    assert set(found) == {"sparse"} and found["sparse"].says == "symptom"
    assert found["sparse"].or_else == ("routing_flips",)
    assert set(findings(rollouts, has_experts=True)) == {"routing_flips"}
    found = findings(rollouts, has_experts=False)
    assert set(found) == {"sparse"} and not found["sparse"].or_else


def test_far_tokens_on_one_side_are_no_routing():
    def above(r):
        return {"behavior": torch.where(chosen(r, 0.004), r.behavior - 5.0, r.behavior)}

    found = findings(edited(run(6), above), has_experts=True)
    assert set(found) == {"sparse"} and "in one direction" in found["sparse"].title


def test_log_ratios_that_no_softmax_makes_are_called_broken_numbers():
    def extreme(r):
        proximal = torch.where(chosen(r, 1e-3), r.proximal - 700, r.proximal)
        behavior = torch.where(chosen(r, 1e-3, 9), r.behavior - 700, r.behavior)
        return {"proximal": proximal, "behavior": behavior}

    found = findings(edited(run(6), extreme))
    assert set(found) == {"sparse"} and not found["sparse"].or_else
    assert "no softmax makes" in found["sparse"].fix


def restricted(depth, first):
    """Over the first tokens of each response the sampler is renormalised to a few tokens of mass e^-depth.

    The mass is that of a prompt at a place, because it is the same for all tokens after one text.
    """

    def at_the_start(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        unlikely = r.proximal - 10.0
        masses = depth * (0.5 + torch.rand(PROMPTS, LENGTH, generator=g))
        mass = masses[torch.tensor(r.groups)[r.segments.ids.long()], r.segments.within.long()]
        noise = 0.01 * torch.randn(r.size, generator=g)
        behavior = torch.where(r.segments.within < first, unlikely + mass, unlikely + noise)
        return {"proximal": unlikely, "behavior": behavior.clamp(max=-1e-3)}

    return at_the_start


def test_a_grammar_that_forces_no_token_is_known_by_the_mean_ratio():
    for depth, first in ((4.0, 8), (6.0, 2)):
        assert set(findings(edited(run(4), restricted(depth, first)))) == {"constrained_decoding"}


@pytest.mark.parametrize("share", [3, 1])
def test_a_wide_grammar_of_some_requests_may_also_be_top_p_of_these(share):
    """Another request's grammar restricts every third sample; a masked end token would act on each."""

    def of_some(r):
        behavior = r.proximal + 0.005 * (r.proximal.exp() - 1)
        is_there = (r.segments.within >= 5) & (r.segments.within < 15) & (r.segments.ids % share == 0)
        return {"behavior": torch.where(is_there, (r.proximal + 1.2).clamp(max=-1e-3), behavior)}

    found = findings(edited(run(4, noise=0.0), of_some))
    assert ("constrained_decoding" in found) == (share == 3)
    if share == 3:
        assert found["constrained_decoding"].or_else == ("truncated_sampling",) and len(found) == 1


@pytest.mark.parametrize("begins", [0, 3])
def test_a_grammar_that_the_policy_learns_fades_and_acts_from_the_first_rollout_on(begins):
    """Later rollouts have less and less mass outside the grammar; one that begins later is no grammar."""

    def fading(r):
        whole = restricted(4.0, 8)(r)
        learnt = 4 * max(r.rollout_id - begins, 0)  # of the 64 samples 64, 60, ..., one of 48 in the last
        acts = (r.rollout_id >= begins) & (r.segments.ids % 16 == 0) | (r.segments.ids >= 16 * learnt)
        exact = whole["proximal"].clamp(max=-1e-3)
        return {**whole, "behavior": torch.where(acts & (r.rollout_id >= begins), whole["behavior"], exact)}

    found = findings(edited(run(8), fading))
    assert ("constrained_decoding" in found) == (begins == 0)


def kept(least):
    """A sampler that keeps tokens of at least a share of the largest probability (min-p)."""

    def draw(logits, generator):
        shares = logits.softmax(1)
        inside = logits.masked_fill(shares < least * shares.amax(1, keepdim=True), -torch.inf)
        recorded = inside.log_softmax(1)
        drawn = torch.multinomial(recorded.exp(), 1, generator=generator)
        return drawn, recorded.gather(1, drawn)[:, 0]

    return draw


@pytest.mark.parametrize("least", [0.3, 0.6])
def test_zeros_of_tokens_that_sampling_kept_alone_were_not_filled_in(least):
    found = findings(run(6, draw=kept(least)))
    assert "truncated_sampling" in found and "shared_value" not in found


def test_zeros_that_no_sampling_leaves_alone_are_named_beside_it():
    found = findings(edited(run(6, draw=kept(0.1)), filled(0.05, 0.0)))
    assert "shared_value" in found


def test_tokens_are_counted_once_and_their_ids_are_called_ids():
    """213 tokens of 88 ids were 213 in the title, "88 different tokens", and 0 "without a log-prob"."""
    rollouts = list(edited(run(6), filled(0.02, 0.0)))
    found = [
        (float(b), float(p))
        for r in rollouts
        for b, p, response in zip(r.behavior.tolist(), r.proximal.tolist(), r.mask.tolist(), strict=True)
        if response
    ]
    far = sum(b == 0 and abs(p - b) > 0.5 for b, p in found)
    finding = findings(rollouts)["shared_value"]
    assert finding.title.startswith(f"{far} sampled tokens have") and finding.evidence.startswith(
        f"The {far} tokens have at least "
    )
    assert "different tokens" not in finding.evidence
    without = findings([replace(r, tokens=None) for r in rollouts])["shared_value"]
    assert without.evidence.startswith("The tokens hold ")  # such a dump has no ids to count
    names = [tile.name for tile in TILES if "nonfinite" in tile.fields]
    assert names == ["tokens with NaN, infinity or -9999"]  # a filled-in 0 is a number
