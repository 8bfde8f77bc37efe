"""An engine whose first token, which it computes with the prompt, is more precise than the others."""

from __future__ import annotations

import pytest
import torch

from tests.tools.analysis.detectors.toys import Policy, edited, findings, run


def noisy(begin, until=10**6, size=0.6, second=1.0):
    """A run whose trainer differs from the sampler at some places of the responses, by a number per token.

    Args:
        second: how many times as large the number is at the second token.
    """
    noise = size * Policy().normal(60)

    def far(r):
        is_far = (r.segments.within >= begin) & (r.segments.within < until)
        times = torch.where(r.segments.within == 1, second, 1.0)
        return {"proximal": r.proximal + is_far * times * (noise[r.tokens] - noise.mean()).float()}

    return edited(run(6), far)


def test_first_tokens_that_agree_alone_show_where_precision_is_lost():
    found = findings(noisy(1))
    assert "kv_precision" in {name for finding in found.values() for name in (finding.name, *finding.or_else)}
    assert (
        "second token of the responses" in found["kv_precision"].title and not found["kv_precision"].or_else
    )


def test_first_tokens_that_agree_alone_from_the_second_rollout_on_show_another_prefill():
    """An engine whose decoding steps read the first weights, and whose prefills read the pushed ones."""
    since_a_push = edited(noisy(1), lambda r: {"proximal": r.behavior} if not r.rollout_id else {})
    assert "kv_precision" not in findings(since_a_push)


@pytest.mark.parametrize("places", [(0,), (3,), (0, 1)])
def test_first_tokens_that_are_as_far_or_not_alone_show_nothing(places):
    found = findings(noisy(*places))
    assert "kv_precision" not in found or "second token" not in found["kv_precision"].title


def test_a_first_block_that_agrees_alone_shows_where_a_window_cuts():
    """Prompts have 8 tokens, so the first block of 16 positions holds the first 8 tokens of each response."""
    found = findings(noisy(8))
    assert set(found) == {"kv_precision"} and found["kv_precision"].explains > 0.95
    assert found["kv_precision"].title.startswith("From absolute position 16 on")
    assert "at tokens before position 16" in found["kv_precision"].evidence


@pytest.mark.parametrize("until", [24, 32])
def test_later_blocks_that_agree_again_are_no_window(until):
    found = findings(noisy(8, until))
    assert found and "kv_precision" not in found


def test_a_second_token_that_is_further_off_than_all_later_ones_lacks_more_than_precision():
    """Tokens that are verified together get the position of the first of them."""
    found = findings(noisy(1, size=0.3, second=2.0))
    assert found and "kv_precision" not in found


def test_errors_that_add_up_from_the_first_block_on_are_no_window():
    def growing(r):
        noise = Policy().normal(60)
        size = 0.02 * (r.segments.within - 8).clamp(min=0)
        return {"proximal": r.proximal + size * (noise[r.tokens] - noise.mean()).float()}

    found = findings(edited(run(6), growing))
    assert "kv_precision" not in found and "position_drift" in found


@pytest.mark.parametrize(("others", "is_open"), [(0.0, False), (1.0, True)])
def test_far_first_tokens_may_follow_another_prompt_if_others_are_off_as_well(others, is_open):
    """Pads between a prompt and its response; a lost entry leaves all other tokens as they are.

    All far tokens hold more of k3 than the first tokens do, but a few tokens at random are not all of these.
    """

    def padded(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        first, is_off = 20 + 5 * torch.rand(r.size, generator=g), torch.rand(r.size, generator=g) < 0.025
        return {"proximal": r.proximal - torch.where(r.segments.within == 0, first, others * is_off)}

    (finding,) = findings(edited(run(6), padded)).values()
    assert finding.name == "shared_place" and ("much further off" in finding.title) == is_open
    assert finding.or_else == (("prefix_mismatch",) if is_open else ())
