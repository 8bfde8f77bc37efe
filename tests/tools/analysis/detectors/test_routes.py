"""The sampler's experts as they are recorded."""

from __future__ import annotations

import pytest
import torch

from slime_ext.tools.analysis.readers.routes import odd_routes
from slime_ext.tools.analysis.readers.samples import DumpedSample
from tests.tools.analysis.detectors.toys import edited, findings, run

PROMPT, RESPONSE, LAYERS, ACTIVE, EXPERTS = 30, 40, 3, 2, 16


def pair(edit=lambda routed: routed, seed=0):
    g = torch.Generator().manual_seed(seed)
    routed = torch.randint(EXPERTS, (PROMPT + RESPONSE - 1, LAYERS, ACTIVE), generator=g)
    row = DumpedSample(seed, RESPONSE, prompt_length=PROMPT)
    return row, DumpedSample(seed, RESPONSE, prompt_length=PROMPT, routed=edit(routed))


def repeated(begin, count):
    def edit(routed):
        routed[begin : begin + count] = routed[begin]
        return routed

    return edit


def test_rows_that_repeat_are_counted_and_whether_they_are_in_the_prompt():
    pairs = [pair(repeated(5, 20)), pair(repeated(35, 12), 1), pair(seed=2), pair(repeated(5, 4), 3)]
    counted = odd_routes(pairs)
    assert (counted["routed"], counted["repeated"], counted["repeated_prompt"]) == (4, 2, 1)
    assert counted["repeated_tokens"] == 32 and not counted["misfit"]


def test_a_text_that_repeats_a_token_is_routed_alike_for_a_good_reason():
    def told(ids):
        row, sample = pair(repeated(35, 20))
        sample.ids = ids
        return odd_routes([(row, sample)])["repeated"]

    ids = list(range(PROMPT + RESPONSE))
    assert told(ids) == 1 and told(torch.tensor(ids)) == 1
    assert told(ids[:35] + [7] * 20 + ids[55:]) == 0


def test_a_sample_with_the_rows_of_a_longer_one_does_not_fit():
    longer = odd_routes([pair(lambda routed: torch.cat([routed, routed[:15]])), pair(seed=1)])
    assert longer["misfit"] == 1
    whole = odd_routes([pair(lambda routed: torch.cat([routed, routed[:1]]))])  # a row for every token
    assert not whole["misfit"]


def test_replaying_experts_that_repeat_is_no_remedy():
    counts = {"routed": 64, "repeated": 32, "repeated_tokens": 640, "repeated_prompt": 32}
    found = findings(edited(run(), lambda r: {"routing": counts}))
    assert set(found) == {"repeated_routes"} and "Do not replay" in found["repeated_routes"].fix
    found = findings(edited(run(), lambda r: {"routing": {"routed": 64, "misfit": 16}}))
    assert set(found) == {"route_lengths"} and "no remedy" in found["route_lengths"].fix
    assert findings(edited(run(), lambda r: {"routing": {"routed": 64}})) == {}


def appended(first):
    """The rows of a resumed request, appended to those of its first part."""
    return lambda routed: torch.cat([routed[:first], routed])[: len(routed)]


@pytest.mark.parametrize("first", [PROMPT, PROMPT + 6, PROMPT + RESPONSE - 7])
def test_experts_that_come_again_at_other_tokens_are_counted(first):
    row, sample = pair(appended(first))
    sample.ids = list(range(PROMPT + RESPONSE))
    counted = odd_routes([(row, sample)])
    of_both = min(first, PROMPT + RESPONSE - 1 - first)
    assert (counted["again"], counted["again_whole"], counted["again_tokens"]) == (1, 1, of_both)
    assert row.odd_experts == 1 and not counted["repeated"]


def test_a_text_that_comes_again_is_routed_alike_for_a_good_reason():
    row, sample = pair(appended(PROMPT + 6))
    ids = list(range(PROMPT + 6))
    sample.ids = torch.tensor([*ids, *ids][: PROMPT + RESPONSE])
    assert not odd_routes([(row, sample)])["again"] and row.odd_experts == 0


@pytest.mark.parametrize("ids", [None, "x", list(range(12)), torch.zeros(0)])
def test_experts_of_unknown_tokens_do_not_come_again(ids):
    row, sample = pair(appended(PROMPT + 6))
    sample.ids = ids
    assert not odd_routes([(row, sample)])["again"]


@pytest.mark.parametrize("kinds", [1, 2, 4, 16])
def test_rows_that_chance_makes_equal_do_not_come_again(kinds):
    """A collapsed router has a few rows, each of which many tokens share."""
    g = torch.Generator().manual_seed(kinds)
    samples = []
    for i in range(64):
        rows = torch.randint(EXPERTS, (kinds, LAYERS, ACTIVE), generator=g)
        row, sample = pair(lambda routed, rows=rows: rows[torch.randint(len(rows), (69,), generator=g)], i)
        sample.ids = torch.randint(1000, (70,), generator=g)
        samples.append((row, sample))
    assert odd_routes(samples)["again"] <= 1


def test_experts_that_come_again_are_named_with_their_share_and_no_leak_is():
    """The trainer replays them, so that it scores the end of every third sample otherwise."""
    counts = {"routed": 64, "again": 22, "again_tokens": 440, "again_whole": 22}
    odd = torch.tensor([i % 3 == 0 for i in range(64)])

    def replayed(r):
        noise = torch.randn(r.size, generator=torch.Generator().manual_seed(r.rollout_id))
        size = 0.6 * (1 - r.proximal.exp()) * (r.segments.within >= 16) * odd[r.segments.ids.long()]
        proximal = (r.proximal + size * noise - size.square() / 2).clamp(max=-1e-5)
        places = tuple(i % 3 != 1 for i in range(64))  # the far ones come later in their micro-batch
        return {
            "proximal": proximal,
            "routing": counts,
            "odd_experts": tuple(odd.int().tolist()),
            "places": places,
        }

    found = findings(edited(run(), replayed))
    assert set(found) == {"repeated_routes"} and "come again" in found["repeated_routes"].title
    assert found["repeated_routes"].severity == "error" and found["repeated_routes"].explains > 0.95
